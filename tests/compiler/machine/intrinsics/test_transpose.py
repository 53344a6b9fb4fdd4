"""The transpose tile gives the interpreter's result on every target that can run here, for elements of every width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.interpret.loops import run_prim
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.transpose import Transpose
from compiler.machine.target import NAMED


@pytest.mark.parametrize(("dtype", "width"), [("i8", 1), ("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("name", [None, *(t.name for t in NAMED.values() if t.can_run_here)])
def test_rows_become_columns(run_native: Any, name: str | None, dtype: str, width: int) -> None:
    text = f"""
    prim k(source: {dtype}[512], out out: {dtype}[16, 40]) {{
      for parallel b in 2 {{ tile "transpose"(out[0, 20*b], source[256*b]) dims(40) {{width={width}}} }}
    }}
    """
    prim = parse(text).prim("k")
    given = (np.arange(512) % 251 - 125).astype(prim.buffers[0].dtype.numpy)
    out = np.zeros((16, 40), given.dtype)
    if name is None:
        run_prim(prim, [given, out])
    else:
        run_native(prim, [given, out], target=NAMED[name])
    for b in range(2):
        np.testing.assert_array_equal(out[:, 20 * b : 20 * b + 16], given[256 * b :][:256].reshape(16, 16).T)
    np.testing.assert_array_equal(out[:, 16:20], 0)


def test_an_element_of_eight_bytes_is_refused() -> None:
    assert list(Transpose(8).problems()) == ["width is 8, expected 1, 2 or 4 bytes"]
