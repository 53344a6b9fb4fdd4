"""Pairs of rows are interleaved for matrix units. The machine code gives the same bits as the definition in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import For, LoopKind, Tile
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.target import Target

BF16 = DType.BF16.numpy
Array = NDArray[Any]


def run(
    run_native: Callable[..., None], target: Target, op: Intrinsic, arrays: list[Array], num_outputs: int, dims: tuple[int, ...]
) -> None:
    """Run a kernel of one intrinsic on whole arrays. Outputs are the first operands of the intrinsic, but the last parameters of the
    kernel."""
    buffers = [Buffer(f"x{i}", (Dim.of(a.size),), DType.from_numpy(a.dtype)) for i, a in enumerate(arrays)]
    tile = Tile(op, tuple(Load(b, (Dim.of(0),)) for b in buffers), tuple(map(Dim.of, dims)))
    order = [*range(num_outputs, len(arrays)), *range(num_outputs)]
    prim = PrimFunc(tuple(buffers[i] for i in order), num_outputs, For(DimVar("p", 0, 0), Dim.of(1), tile, LoopKind.PARALLEL))
    meant = [a.copy() for a in arrays]
    op.meaning(meant, dims)
    run_native(prim, [arrays[i] for i in order], target=target)
    for found, wanted in zip(arrays, meant, strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("columns", "stride", "seen"), [(16, 16, ()), (32, 80, (3, 12)), (16, 48, (-9, 40)), (32, 32, (16, 20))])
def test_rows_are_interleaved_in_pairs(
    run_native: Callable[..., None], amx: Target, columns: int, stride: int, seen: tuple[int, ...]
) -> None:
    """Rows are interleaved in pairs. Rows outside of the range `seen` become zeros, even if they hold NaN."""
    low, high = seen or (0, 16)
    source = np.random.default_rng(0).normal(size=16 * stride).astype(BF16)
    rows = source.reshape(16, stride)
    rows[[r for r in range(16) if not low <= r < high]] = np.nan
    out = np.full(8 * 70, 7, BF16)
    run(run_native, amx, InterleavePairs(columns, masked=bool(seen)), [out, source], 1, (70, stride, *seen))
    pairs = out.reshape(8, 70)
    assert (pairs[:, 2 * columns :] == 7).all()
    found = pairs[:, : 2 * columns].reshape(8, columns, 2).transpose(0, 2, 1).reshape(16, columns)
    np.testing.assert_array_equal(found, np.nan_to_num(rows[:, :columns].astype(np.float32)).astype(BF16))
