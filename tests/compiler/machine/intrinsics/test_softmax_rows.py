"""The softmax of a block of scores: the error of its powers, and the same bits in NumPy and in machine code, alone and during products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import For, LoopKind, Seq, Tile
from compiler.ir.tiles import TileOp
from compiler.machine.intrinsics.amx import AmxConfigure
from compiler.machine.intrinsics.amx_attend import AmxAttend
from compiler.machine.intrinsics.softmax_rows import LONG, SHORT, SoftmaxRows, power
from compiler.machine.target import Target

Array = NDArray[Any]
PANELS = 4


@pytest.mark.parametrize(("coefficients", "error"), [(LONG, 1.5e-7), (SHORT, 8.6e-5)], ids=["long", "short"])
def test_powers_are_near(coefficients: Sequence[float], error: float) -> None:
    x = np.concatenate([np.linspace(-126, 0, 16000), -np.exp2(np.linspace(-30, 6, 1600))]).astype(np.float32)
    assert np.abs(power(x, coefficients) / np.exp2(x.astype(np.float64)) - 1).max() <= error
    limits = np.array([0, -0.0, -126.5, -1e30, -np.inf, np.nan], np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(power(limits, coefficients), np.array([1, 1, 0, 0, 0, np.nan], np.float32))


def rows_of(rng: np.random.Generator, rows: int) -> list[Array]:
    """Return weights, scores, maximum, sums and factors. Some keys are hidden. The scores of a row are far below its maximum, and another
    row has seen no key."""
    scores = (rng.normal(size=(PANELS, rows, 32)) * 40).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    maximum, sums = (rng.normal(size=rows) * 50).astype(np.float32), rng.random((rows, 16), np.float32)
    scores[:, 0] -= 900
    maximum[-1], sums[-1] = -1e30, 0
    return [np.zeros((rows, PANELS * 32), ml_dtypes.bfloat16), scores, maximum, sums, np.zeros(-(-rows // 16) * 16, np.float32)]


def check(run_native: Callable[..., None], target: Target, op: TileOp, rows: int, arrays: list[Array], dims: tuple[int, ...]) -> None:
    """Compute with machine code and with NumPy. All arrays must be equal afterwards, except for the room after the factors."""
    buffers = [Buffer(f"x{i}", tuple(map(Dim.of, a.shape)), DType.from_numpy(a.dtype)) for i, a in enumerate(arrays)]
    places = tuple(Load(b, (Dim.of(0),) * len(b.shape)) for b in buffers)
    body = Seq((Tile(AmxConfigure(rows), ()), Tile(op, places, tuple(map(Dim.of, dims)))))
    found = [aligned(a) for a in arrays]
    run_native(PrimFunc(tuple(buffers), len(buffers), For(DimVar("item", 0, 0), Dim.of(1), body, LoopKind.PARALLEL)), found, target=target)
    op.meaning([a.reshape(-1) for a in arrays], dims)
    count = dims[0] if isinstance(op, SoftmaxRows) else rows
    found[4][count:] = arrays[4][count:]
    for i, (one, other) in enumerate(zip(found, arrays, strict=True)):
        assert one.tobytes() == other.tobytes(), i


def aligned(array: Array) -> Array:
    """Return a copy that begins at a cache line, like memory of a kernel."""
    memory = np.zeros(array.nbytes + 64, np.int8)
    made = memory[-memory.ctypes.data % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (28, 28), (40, 17)])
def test_weights_have_the_bits_of_their_definition(run_native: Callable[..., None], amx: Target, rows: int, count: int) -> None:
    arrays = rows_of(np.random.default_rng(rows), rows)
    native = [a.copy() for a in arrays]
    check(run_native, amx, SoftmaxRows(rows, PANELS), min(rows, 32), native, (count,))
    np.testing.assert_array_equal(native[2][count:], arrays[2][count:])
    hidden = arrays[1][:, :count].swapaxes(0, 1).reshape(count, -1) == -np.inf
    assert not native[0][:count][hidden].any()
    assert rows == 1 or not native[0][0].any()  # the scores of the first row are far below its maximum


@pytest.mark.parametrize(("rows", "depth", "value_panels"), [(28, 64, 2), (16, 96, 1), (5, 32, 3), (32, 128, 4)])
def test_products_do_not_disturb_the_softmax(
    run_native: Callable[..., None], amx: Target, rows: int, depth: int, value_panels: int
) -> None:
    rng = np.random.default_rng(rows)

    def random(*shape: int) -> Array:
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16)

    keys = [np.zeros((PANELS, rows, 32), np.float32), random(rows, depth), random(PANELS, depth // 2, 64)]
    values = [np.zeros((value_panels, rows, 32), np.float32), random(rows, PANELS * 32), random(value_panels, PANELS * 16, 64)]
    for key_panels, of_values in ((PANELS, value_panels), (0, value_panels), (PANELS, 0), (0, 0)):
        for seen, earlier in ((PANELS, PANELS), (1, 2), (2, 1), (3, 3)):
            arrays = [a.copy() for a in (*rows_of(rng, rows), *keys, *values)]
            dims = seen, min(key_panels, seen), of_values, earlier
            check(run_native, amx, AmxAttend(rows, PANELS, depth, value_panels), rows, arrays, dims)
