"""The machine code of AMX tiles, on a real unit or on the emulation in amx_unit.c, gives the same bits as their definition in NumPy at all
sizes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
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
from compiler.machine.intrinsics.amx import AmxBf16, AmxConfigureRows, AmxI8ByI8, AmxI8ByU8, AmxStayAwake
from compiler.machine.intrinsics.amx_channels import AHEAD, RING, STEP, AmxChannels
from compiler.machine.intrinsics.amx_widening import AmxWidening
from compiler.machine.intrinsics.product import MatrixUnitOp
from compiler.machine.target import Target

Array = NDArray[Any]
SIZES = [(1, 32), (2, 16), (8, 32), (15, 16), (16, 16), (16, 32), (17, 16), (17, 32), (31, 32), (32, 16), (32, 32)]


def tiled(op: MatrixUnitOp, *before: TileOp) -> PrimFunc:
    """Return a kernel in which each of two work items computes c += a @ b with one tile. Each work item must configure the matrix unit,
    whatever state the unit is in. The tiles `before` run just before the product."""
    k, stride, packed = DimVar("k", lower=64, multiple_of=64), DimVar("stride", lower=1), 4 // op.row_dtype.num_bytes
    a = Buffer("a", (Dim.of(op.rows), stride.dim), op.row_dtype)
    b = Buffer("b", (k // packed, Dim.of(op.columns * packed)), op.panel_dtype)
    c = Buffer("c", (Dim.of(2), Dim.of(op.rows), Dim.of(op.columns)), op.accumulator)
    item = DimVar("item", 0, 1)
    places = (Load(c, (item.dim, Dim.of(0), Dim.of(0))), *(Load(x, (Dim.of(0), Dim.of(0))) for x in (a, b)))
    body = Seq((Tile(op.configuration), *(Tile(tile, ()) for tile in before), Tile(op, places, (k.dim, stride.dim))))
    return PrimFunc((k, stride, a, b, c), 1, For(item, Dim.of(2), body, LoopKind.PARALLEL))


def check(
    run_native: Any, target: Target, op: MatrixUnitOp, arrays: tuple[Array, Array, Array], dims: tuple[int, int], *before: TileOp
) -> Array:
    """Run the tile in two work items, and return the sum that both compute. The sum must equal that of the tile's definition in NumPy."""
    c, a, b = arrays
    prim = tiled(op, *before)
    found, wanted = np.stack([c, c]), c.copy()
    k_var, stride_var = (p for p in prim.params if isinstance(p, DimVar))
    run_native(prim, [a, b, found], {k_var: dims[0], stride_var: dims[1]}, target=target)
    op.meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), dims)
    for item in found:
        assert item.tobytes() == wanted.tobytes()
    return wanted


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_bf16(run_native: Callable[..., None], amx: Target, rows: int, columns: int) -> None:
    rng, (k, stride) = np.random.default_rng(rows), (192, 211)
    a, b = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((rows, stride), (k // 2, columns * 2)))
    check(run_native, amx, AmxBf16(rows, columns), (rng.normal(size=(rows, columns)).astype(np.float32), a, b), (k, stride))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_bytes(run_native: Callable[..., None], amx: Target, rows: int, columns: int) -> None:
    rng, (k, stride) = np.random.default_rng(rows), (192, 211)
    a, b = rng.integers(-128, 128, (rows, stride)).astype(np.int8), rng.integers(0, 256, (k // 4, columns * 4)).astype(np.uint8)
    c = rng.integers(-9, 9, (rows, columns)).astype(np.int32)
    check(run_native, amx, AmxI8ByU8(rows, columns), (c, a, b), (k, stride))


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (17, 16), (32, 32)])
def test_signed_bytes(run_native: Callable[..., None], amx: Target, rows: int, columns: int) -> None:
    rng, (k, stride) = np.random.default_rng(rows), (192, 211)
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((rows, stride), (k // 4, columns * 4)))
    check(
        run_native,
        amx,
        AmxI8ByI8(rows, columns, cached_panel=True),
        (rng.integers(-9, 9, (rows, columns)).astype(np.int32), a, b),
        (k, stride),
    )


def aligned(count: int) -> Array:
    """Return zeros of i8 that begin at a cache line, like memory of a kernel."""
    made = np.zeros(count + 64, np.int8)
    return made[-made.ctypes.data % 64 :][:count]


def buffers_of(**arrays: Array) -> list[Buffer]:
    names = {x.dtype: DType(str(x.dtype).replace("uint", "u").replace("int", "i")) for x in arrays.values()}
    return [Buffer(name, tuple(map(Dim.of, x.shape)), names[x.dtype]) for name, x in arrays.items()]


@pytest.mark.parametrize(("blocks", "columns", "rows", "second"), [(1, 32, 5, 0), (2, 32, 16, 3), (2, 16, 16, 16), (1, 16, 16, 0)])
@pytest.mark.parametrize(("share", "items"), [(0, 0), (1 << 15, 3), (3 << 14, 2), (5 << 16, 16)])
def test_a_product_widens_what_comes_next(
    run_native: Callable[..., None], amx: Target, blocks: int, columns: int, rows: int, second: int, share: int, items: int
) -> None:
    rng, k, stride, group, length = np.random.default_rng(rows), 192, 211, 64, 512
    op, first = AmxWidening(blocks, columns, group), share
    a, b = rng.integers(-128, 128, (32, stride)).astype(np.int8), rng.integers(-128, 128, (k // 4, columns * 4)).astype(np.int8)
    panel = rng.integers(0, 256, (length // 8, columns * 4)).astype(np.uint8)
    multipliers = rng.integers(-127, 128, (length // group, columns)).astype(np.int8)
    c, wide = rng.integers(-9, 9, (blocks * 16, columns)).astype(np.int32), aligned(length * columns)
    arrays = [c, wide, a, b, panel, multipliers]
    buffers = buffers_of(c=c, wide=wide, a=a, b=b, panel=panel, multipliers=multipliers)
    begin = [Load(x, tuple(Dim.of(0) for _ in x.shape)) for x in buffers]
    product = Tile(
        op,
        (begin[0], begin[2], begin[3], begin[1], *begin[4:], *begin[4:]),
        tuple(map(Dim.of, (k, stride, rows, second, first, share, items))),
    )
    once = DimVar("once", upper=0)
    body = For(once, Dim.of(1), Seq((Tile(AmxConfigureRows(), (), (Dim.of(rows),)), product)), LoopKind.PARALLEL)
    found = [c.copy(), aligned(length * columns), *arrays[2:]]
    run_native(PrimFunc((*buffers[2:], *buffers[:2]), 2, body), [*found[2:], *found[:2]], {}, target=amx)
    flat = [x.reshape(-1) for x in (c, a, b, wide, panel, multipliers, panel, multipliers)]
    op.meaning(flat, (k, stride, rows, second, first, share, items))
    for block in range(blocks):
        np.testing.assert_array_equal(found[0][block * 16 :][:rows], c[block * 16 :][:rows])
    np.testing.assert_array_equal(found[1], wide)


@pytest.mark.parametrize(
    ("registers", "columns", "rows", "starts"),
    [(1, 32, 5, (0, 0)), (1, 16, 16, (0, 0)), (2, 32, 16, (3, 3)), (2, 16, 16, (16, 16)), (3, 32, 16, (16, 25)), (3, 16, 16, (16, 32))],
)
@pytest.mark.parametrize(
    ("k", "group", "slot", "following"), [(192, 64, 0, AHEAD), (256, 32, 3, 0), (128, 64, 2, AHEAD), (768, 256, 1, AHEAD), (128, 32, 1, 0)]
)
def test_few_rows_are_multiplied_by_whole_channels(
    run_native: Callable[..., None],
    amx: Target,
    registers: int,
    columns: int,
    rows: int,
    starts: tuple[int, int],
    k: int,
    group: int,
    slot: int,
    following: int,
) -> None:
    """The tile gives the sums of the widened panel. Afterwards its ring, into which it widens steps ahead, holds the first steps of the
    next panel."""
    rng, stride = np.random.default_rng(k + rows), k + 19
    op, dims = AmxChannels(registers, columns, group), (k, stride, rows, *starts, slot, following)
    a = rng.integers(-128, 128, (48, stride)).astype(np.int8)
    panels = rng.integers(0, 256, (2, k // 8, columns * 4)).astype(np.uint8)
    multipliers = rng.integers(-127, 128, (2, k // group, columns)).astype(np.int8)
    c, ring = np.full((registers * 16, columns), 77, np.int32), aligned(RING * STEP * columns)
    first = np.zeros(-(-AHEAD * STEP // group) * group * columns, np.int8)
    op.widening.meaning((first, panels[0].reshape(-1), multipliers[0].reshape(-1)), (AHEAD * STEP,))
    for step in range(AHEAD):
        ring.reshape(RING, -1)[(slot + step) % RING] = first.reshape(-1, STEP * columns)[step]
    made, later = aligned(ring.size), [panels[1].reshape(-1), multipliers[1].reshape(-1)]
    made[:] = ring
    buffers = buffers_of(c=c, ring=made, a=a, panels=panels, multipliers=multipliers)
    begin = [Load(x, tuple(Dim.of(0) for _ in x.shape)) for x in buffers]
    other = [Load(x, (Dim.of(1), Dim.of(0), Dim.of(0))) for x in buffers[3:]]
    product = Tile(op, (begin[0], begin[2], begin[1], *begin[3:], *other), tuple(map(Dim.of, dims)))
    once = DimVar("once", upper=0)
    body = For(once, Dim.of(1), Seq((Tile(AmxConfigureRows(), (), (Dim.of(rows),)), product)), LoopKind.PARALLEL)
    found = c.copy()
    run_native(PrimFunc((*buffers[2:], *buffers[:2]), 2, body), [a, panels, multipliers, found, made], {}, target=amx)
    op.meaning([x.reshape(-1) for x in (c, a, ring, panels[0], multipliers[0], *later)], dims)
    whole = np.zeros((k // 4, columns, 4), np.int8)
    op.widening.meaning((whole.reshape(-1), panels[0].reshape(-1), multipliers[0].reshape(-1)), (k,))
    for register, start in enumerate((0, *starts)[:registers]):
        meant = np.einsum("rgi,gci->rc", a[start : start + rows, :k].reshape(rows, -1, 4).astype(np.int32), whole.astype(np.int32))
        np.testing.assert_array_equal(c[register * 16 :][:rows], meant)
        np.testing.assert_array_equal(found[register * 16 :][:rows], meant)
    np.testing.assert_array_equal(made, ring)


def test_a_fresh_sum_forgets_what_was_there(run_native: Callable[..., None], amx: Target) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((16, 64), (32, 32)))
    check(run_native, amx, AmxBf16(16, 16, fresh=True), (np.full((16, 16), np.nan, np.float32), a, b), (64, 64))
    a, b = rng.integers(-128, 128, (16, 64)).astype(np.int8), rng.integers(0, 256, (16, 64)).astype(np.uint8)
    check(run_native, amx, AmxI8ByU8(16, 16, fresh=True), (np.full((16, 16), 77, np.int32), a, b), (64, 64))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_unit_that_is_kept_awake_computes_the_same(run_native: Callable[..., None], amx: Target, fresh: bool) -> None:
    """The registers that `AmxStayAwake` changes may hold anything afterwards, so the product that follows must not read them."""
    a, b = (np.full(s, np.nan).astype(ml_dtypes.bfloat16) for s in ((16, 64), (32, 32)))
    op, awake = AmxBf16(16, 16, fresh=fresh), [AmxStayAwake()] * 3
    check(run_native, amx, op, (np.zeros((16, 16), np.float32), a, b), (64, 64), *awake)
    a, b = (np.random.default_rng(0).normal(size=s).astype(ml_dtypes.bfloat16) for s in ((16, 64), (32, 32)))
    assert np.isfinite(check(run_native, amx, op, (np.ones((16, 16), np.float32), a, b), (64, 64), *awake)).all()


@pytest.mark.parametrize(("rows", "columns"), [(5, 16), (28, 32)])
def test_bf16_over_a_cached_panel(run_native: Callable[..., None], amx: Target, rows: int, columns: int) -> None:
    rng, (k, stride) = np.random.default_rng(rows), (64, 130)
    a, b = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((rows, stride), (k // 2, columns * 2)))
    check(
        run_native, amx, AmxBf16(rows, columns, cached_panel=True), (rng.normal(size=(rows, columns)).astype(np.float32), a, b), (k, stride)
    )


def test_denormals_count_as_zero(run_native: Callable[..., None], amx: Target) -> None:
    """Denormal factors, products and sums count as zero."""
    numbers = np.array([1e-39, -1e-39, 2e-20, -1e-19, 1.5, 0.0, -0.0], np.float32)
    rng = np.random.default_rng(0)
    a, b = (rng.choice(numbers, s).astype(ml_dtypes.bfloat16) for s in ((16, 64), (32, 32)))
    check(run_native, amx, AmxBf16(16, 16), (np.full((16, 16), 1e-40, np.float32), a, b), (64, 64))
    small = [np.full(s, 1e-20).astype(ml_dtypes.bfloat16) for s in ((16, 64), (32, 32))]
    assert not check(run_native, amx, AmxBf16(16, 16), (np.full((16, 16), 1e-40, np.float32), small[0], small[1]), (64, 64)).any()


def test_every_sign_of_bytes(run_native: Callable[..., None], amx: Target) -> None:
    a, b = np.full((16, 64), -128, np.int8), np.full((16, 64), 255, np.uint8)
    found = check(run_native, amx, AmxI8ByU8(16, 16), (np.zeros((16, 16), np.int32), a, b), (64, 64))
    assert (found == -128 * 255 * 64).all()


@pytest.mark.parametrize(
    ("code", "said"),
    [("0f0b", ""), ("c4e27b49c0", "tile that is not configured"), ("c4e25a5cc1", "product without a configuration")],
    ids=["another instruction", "tilezero", "tdpbf16ps"],
)
def test_what_the_unit_would_refuse_ends_the_process(matrix_unit: Any, code: str, said: str) -> None:
    """The emulation ends the process on every error that a real unit would report. A kernel that forgets to configure the unit therefore
    fails in these tests."""
    if matrix_unit.library is None:
        pytest.skip("this machine has AMX, so nothing is emulated")
    program = f"""
import ctypes, mmap
ctypes.CDLL({str(matrix_unit.library)!r}).amx_install()
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("{code}c3"))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGILL
    assert ended.stderr == (f"AMX: the unit would refuse this: {said}\n" if said else "")
