"""The machine instruction that rounds f32 to bf16 gives NumPy's results, except for denormals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.interpret.loops import run_prim
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED

TARGET = NAMED["avx512-vnni-bf16"]
ROUNDING = """
prim k(x: f32[48], out short: bf16[48]) {
  for parallel b in 3 { tile "round_bf16"(short[16*b], x[16*b]) }
}
"""


@pytest.mark.parametrize("native", [False, True])
def test_numbers_are_rounded_to_the_nearest(run_native: Callable[..., None], native: bool) -> None:
    x = np.random.default_rng(0).normal(size=48).astype(np.float32)
    x[:8] = 0.0, -0.0, 1e-39, -1e-39, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, np.nan
    short, prim = np.zeros(48, DType.BF16.numpy), parse(ROUNDING).prim("k")
    if native:
        if not TARGET.can_run_here:
            pytest.skip("this CPU does not round to bf16")
        run_native(prim, [x, short], target=TARGET)
    else:
        run_prim(prim, [x, short])
    x[2:4] = 0.0, -0.0
    wanted = x.astype(DType.BF16.numpy)
    np.testing.assert_array_equal(short.view(np.uint16)[:7], wanted.view(np.uint16)[:7])
    np.testing.assert_array_equal(short[8:], wanted[8:])
    assert np.isnan(short[7])
