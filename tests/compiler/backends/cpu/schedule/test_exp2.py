"""Powers of two for attention weights: their error, their limits, and the same bits in the interpreter and in machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.schedule.attention.exp2 import exp2, exp2_of_weights
from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel

Function = Callable[[Scalar], Scalar]
FUNCTIONS = pytest.mark.parametrize(("function", "error"), [(exp2, 2e-7), (exp2_of_weights, 1.1e-4)], ids=["exp2", "weights"])


def applied(function: Function, given: NDArray[np.float32], run: Callable[..., Any]) -> NDArray[np.float32]:
    x, y = (Buffer(name, (Dim.of(len(given)),), DType.F32) for name in "xy")
    k = Kernel()
    with k.parallel("i", len(given) // 16) as i, k.vector(16) as lane:
        k.array(y)[i * 16 + lane] = function(k.array(x)[i * 16 + lane])
    out = np.empty_like(given)
    run(PrimFunc((x, y), 1, k.body()), [given, out])
    return out


@FUNCTIONS
def test_powers_are_near_and_have_the_same_bits_everywhere(run_native: Callable[..., None], function: Function, error: float) -> None:
    given = np.concatenate([np.linspace(-126, 0, 16000), -np.exp2(np.linspace(-30, 6, 1600))]).astype(np.float32)
    found, meaning = applied(function, given, run_native), np.exp2(given.astype(np.float64))
    assert np.abs(found / meaning - 1).max() <= error
    np.testing.assert_array_equal(applied(function, given, run_prim), found)


@FUNCTIONS
def test_a_hidden_key_has_weight_0_and_the_largest_has_1(run_native: Callable[..., None], function: Function, error: float) -> None:
    given = np.array([0, -0.0, -127, -128, -1e30, -np.inf, np.nan, -1] * 2, np.float32)
    for run in (run_native, run_prim):
        found = applied(function, given, run)
        assert (found[:6].view(np.int32) == np.array([1, 1, 0, 0, 0, 0], np.float32).view(np.int32)).all()
        assert np.isnan(found[6]) and abs(found[7] - 0.5) <= error
