"""The tiles that multiply few rows by 4-bit weights as if they were widened. Their machine code computes the same as their definitions in
NumPy for all bytes, numbers and multipliers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import For, LoopKind, Tile
from compiler.ir.tiles import TileOp
from compiler.machine.intrinsics.dot_widened import LONGEST, DotWidened
from compiler.machine.intrinsics.group_sums import GroupSums
from compiler.machine.intrinsics.widen_panel import WidenPanel
from compiler.machine.target import NAMED, host

TARGET = NAMED["amx"]
VECTORS = TARGET.features - {"amx-tile", "amx-bf16", "amx-int8"}
K = 512
ZERO = Dim.of(0)


def kernel(op: TileOp, shapes: list[tuple[int, ...]], dims: tuple[int, ...]) -> PrimFunc:
    """Return a kernel that consists of a tile. The operand that the tile writes is its output."""
    buffers = [Buffer(o.name, tuple(map(Dim.of, shape)), o.dtype or DType.I8) for o, shape in zip(op.operands, shapes, strict=True)]
    tile = Tile(op, tuple(Load(b, (ZERO,) * len(b.shape)) for b in buffers), tuple(map(Dim.of, dims)))
    return PrimFunc((*buffers[1:], buffers[0]), 1, For(DimVar("once", upper=0), Dim.of(1), tile, LoopKind.PARALLEL))


@pytest.fixture
def vectors() -> None:
    if not host().features >= VECTORS:
        pytest.skip("this machine has no AVX-512 with VNNI and VBMI")


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("columns", "group"), [(32, 32), (32, 128), (16, 64)])
def test_machine_code_is_what_is_meant(run_native: Callable[..., None], rows: int, columns: int, group: int) -> None:
    rng, groups = np.random.default_rng(group), K // group
    a = rng.integers(-128, 128, (rows, K)).astype(np.int8)
    panel = rng.integers(0, 256, (K // 8, columns * 4)).astype(np.uint8)
    multipliers = rng.integers(-127, 128, (groups, columns)).astype(np.int8)
    multipliers[0, :2], a[0, :group], panel[: group // 8, :8] = (127, -127), -128, 0  # the largest sum of a group
    begins = (a.reshape(rows, groups, -1).sum(-1, dtype=np.int32) * -8).astype(np.int32)
    found = rng.integers(-1000, 1000, (rows, columns)).astype(np.int32)
    wanted = found.copy()
    op = DotWidened(rows, columns, group)
    shapes = [x.shape for x in (found, a, begins, panel, multipliers)]
    run_native(kernel(op, shapes, (K, K, groups)), [a, begins, panel, multipliers, found], {}, target=NAMED["amx"])
    op.meaning([x.reshape(-1) for x in (wanted, a, begins, panel, multipliers)], (K, K, groups))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("group", [32, 128])
def test_meaning_is_the_product_by_widened_weights(group: int) -> None:
    rng, rows, columns = np.random.default_rng(group), 3, 32
    a = rng.integers(-128, 128, (rows, K)).astype(np.int8)
    panel = rng.integers(0, 256, (K // 8, columns * 4)).astype(np.uint8)
    multipliers = rng.integers(-127, 128, (K // group, columns)).astype(np.int8)
    wide = np.zeros(K * columns, np.int8)
    WidenPanel(columns, group).meaning((wide, panel.reshape(-1), multipliers.reshape(-1)), (K,))
    widened = wide.reshape(K // 4, columns, 4).swapaxes(1, 2).reshape(K, columns).astype(np.int64)
    begins = (a.reshape(rows, K // group, -1).sum(-1, dtype=np.int32) * -8).astype(np.int32)
    found = np.zeros(rows * columns, np.int32)
    flat = [x.reshape(-1) for x in (a, begins, panel, multipliers)]
    DotWidened(rows, columns, group).meaning([found, *flat], (K, K, K // group))
    np.testing.assert_array_equal(found.reshape(rows, columns), a.astype(np.int64) @ (8 * widened - 4))


def test_eighths_of_the_longest_sum_fit() -> None:
    """The largest sum of LONGEST products is 127 * 128 per product. Eight times this sum, with half a step per product, fits in i32."""
    assert 8 * 127 * 128 * LONGEST < 1 << 31
    assert 8 * 127 * 128 * (LONGEST + 512) > 1 << 31


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("group", "times"), [(32, 8), (96, 255)])
def test_sums_of_groups(run_native: Callable[..., None], group: int, times: int) -> None:
    a = np.random.default_rng(group).integers(-128, 128, (5, group)).astype(np.int8)
    a[:2] = [[-128], [127]]
    found, op = np.zeros(5, np.int32), GroupSums(group, times)
    run_native(kernel(op, [(5,), a.shape], (5,)), [a, found], {}, target=NAMED["amx"])
    np.testing.assert_array_equal(found, a.sum(1, dtype=np.int32) * -times)
    op.meaning([found, a.reshape(-1)], (5,))
    np.testing.assert_array_equal(found, a.sum(1, dtype=np.int32) * -times)
