"""Reductions over the lanes of vectors: the result, and the order in which lanes are added."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from compiler.backends.cpu.schedule.folds import fold_halves, spread_largest
from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.write import Kernel

F32 = DType.F32


@pytest.mark.parametrize("shape", [(16,), (4, 8)])
def test_halves_are_added_in_one_order(shape: tuple[int, ...]) -> None:
    """A reduction first adds rows, then lanes. Each step adds the upper half to the lower half. This order determines how the sum is
    rounded."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    rows = values.reshape(-1, shape[-1])
    while len(rows) > 1:
        rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
    (lanes,) = rows
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]

    dest, k = Buffer("y", tuple(map(Dim.of, shape)), F32), Kernel()
    fold_halves(k, k.array(dest), operator.add)
    found = values.copy()
    run_prim(PrimFunc((dest,), 1, k.body()), [found])
    assert found.flat[0] == lanes[0]


def test_the_largest_lane_reaches_all() -> None:
    values = np.random.default_rng(0).standard_normal(16, np.float32)
    dest, k = Buffer("y", (Dim.of(16),), F32), Kernel()
    spread_largest(k, k.array(dest))
    found = values.copy()
    run_prim(PrimFunc((dest,), 1, k.body()), [found])
    np.testing.assert_array_equal(found, np.full(16, values.max()))
