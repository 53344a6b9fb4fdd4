"""The pass stores numbers of tables in 8 bits. They keep their values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.passes.base import Pass
from compiler.passes.widen_tables import widen_tables

PROGRAM = """
    func main(x: f32[n, 64], weight q: u8[6, 32], weight s: f32[6, 2]) -> f32[n, 6] {
      w = dequantize(q, s, bits=4, group=32, kind="iq4")
      y = linear(x, w)
      return y
    }
"""


@pytest.mark.parametrize("kind", ["iq4", "iq3_s", "iq3_xxs", "iq2", "iq1"])
def test_indices_become_integers(kind: str) -> None:
    rng = np.random.default_rng(0)
    x, q, s = rng.standard_normal((3, 64), np.float32), rng.integers(0, 256, (6, 32)).astype(np.uint8), rng.random((6, 2), np.float32)
    before, after = (widen(parse(PROGRAM.replace("iq4", kind))) for widen in (lambda module: module, widen_tables))
    np.testing.assert_array_equal(Interpreter(before).call("main", x, q, s), Interpreter(after).call("main", x, q, s))
    held = [str(b.var.type) for b in after.graph("main").body.bindings]
    assert any("i8[6, 64]" in kind for kind in held), held


def test_other_numbers_stay(stays: Callable[[Pass, str], None]) -> None:
    stays(widen_tables, PROGRAM.replace("iq4", "e2m1"))
