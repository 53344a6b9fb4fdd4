"""Weight formats: packing a matrix and decoding it element by element gives the matrix again. Both operations compute the same as their
definitions in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import FORMATS
from compiler.ir.loops.write import Kernel, cast
from compiler.ir.module import IRModule
from compiler.ir.numbers import DOUBLED_E2M1, TABLES
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.machine.formats import (
    BRICKS,
    EIGHTHS,
    FRAGMENTS,
    FRAGMENTS4,
    FRAGMENTS8,
    FRAGMENTS_E2M1,
    FRAGMENTS_E4M3,
    LANES4,
    LANES8,
    LANES_E4M3,
    PANEL4,
    PANEL_E4M3,
    PANELS,
    SCALED4,
    WIDENED4,
    Fragments,
    IntegerFragments,
    Ordered,
    Panels,
    TablePanels,
)

COLUMNS, N, K = 4, 8, 32
RNG = np.random.default_rng(11)


def buffer(name: str, array: np.ndarray) -> Buffer:
    return Buffer(name, tuple(map(Dim.of, array.shape)), DType.from_numpy(array.dtype))


def numbers(format: Panels) -> np.ndarray:
    """Return random weights as the packing function expects them: signed with 8 or 6 bits; with 4 bits, unsigned with the format's offset
    added, or the bits of floats."""
    low = 0 if format.held_bits == 4 else -format.offset
    return RNG.integers(low, low + 2**format.bits, (N, K))


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_holds_the_weights_that_are_packed(name: str) -> None:
    format = PANELS[name]
    given = numbers(format)
    stored = given if format.held_bits == 4 else given + format.offset
    if isinstance(format, TablePanels):
        stored = TABLES[format.kind].astype(np.int32)[given] + format.offset
    np.testing.assert_array_equal(format.stored(format.packed(given, COLUMNS)), stored)


def test_floats_of_four_bits_are_those_of_the_standard() -> None:
    """A float has a sign, two bits of exponent with a bias of 1, and one bit of mantissa. Without exponent, it is 0 or 0.5."""
    floats = [(m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1)) * (-1) ** sign for sign in (0, 1) for e in range(4) for m in (0, 1)]
    np.testing.assert_array_equal(DOUBLED_E2M1 / 2, floats)


@pytest.mark.parametrize("name", PANELS)
def test_columns_that_fill_the_last_panel_hold_weights_of_zero(name: str) -> None:
    format = PANELS[name]
    stored = format.stored(format.packed(numbers(format)[: N - 1], COLUMNS))
    # Some tables have no 0. Scales of such columns are 0.
    least = int(min(TABLES[format.kind], key=abs)) if isinstance(format, TablePanels) else 0
    assert (stored[N - 1] == format.offset + least).all()


def elements(name: str, *arrays: np.ndarray, length: int = K) -> np.ndarray:
    """Decode each element of a packed matrix. The decoding kernel is printed and parsed again before it runs, to test its text."""
    format, k = FORMATS[name], Kernel()
    stored, out = [buffer(f"b{i}", a) for i, a in enumerate(arrays)], np.zeros((N, length), np.int32)
    y = k.array(buffer("y", out))
    with k.nest(y.shape) as (n, r):
        y[n, r] = format.element(tuple(stored), n, r)
    prim = PrimFunc((*stored, y.buffer), 1, k.body())
    run_prim(parse(print_module(IRModule({"f": prim}))).prim("f"), (*arrays, out))
    return out


@pytest.mark.parametrize("name", PANELS)
def test_elements_of_panels(name: str) -> None:
    panels = PANELS[name].packed(numbers(PANELS[name]), COLUMNS)
    np.testing.assert_array_equal(elements(name, panels), PANELS[name].stored(panels))


def test_elements_that_are_widened() -> None:
    panels = PANEL4.packed(numbers(PANEL4), COLUMNS)
    multipliers = RNG.integers(-127, 128, (N // COLUMNS, 2, COLUMNS)).astype(np.int8)
    eighths = (PANEL4.stored(panels).astype(np.int32) - 8) * np.repeat(multipliers.transpose(0, 2, 1).reshape(N, 2), K // 2, -1)
    np.testing.assert_array_equal(elements(WIDENED4.name, panels, multipliers), (eighths + 4) >> EIGHTHS)


@pytest.mark.parametrize(("num_groups", "streams", "run"), [(32, 4, 4), (28, 4, 1), (24, 4, 2), (18, 2, 1), (1, 1, 1)])
def test_elements_with_their_scales(num_groups: int, streams: int, run: int) -> None:
    """A group has lines of a panel, and then the scales of its columns. Consecutive runs of groups are in different streams."""
    length = num_groups * SCALED4.depth
    given = RNG.integers(0, 16, (2 * SCALED4.columns, length))
    panels = PANEL4.packed(given, SCALED4.columns).reshape(2, num_groups, -1).view(np.uint16)
    scales = RNG.integers(0, 1 << 16, (2, num_groups, SCALED4.columns), np.uint16)
    groups = np.concatenate([panels, scales], -1).view(np.int16).reshape(2, -1, streams, run * SCALED4.words)
    matrix = np.ascontiguousarray(groups.transpose(2, 0, 1, 3))
    assert matrix.shape == tuple(d.const for d in SCALED4.shape(Dim.of(2), Dim.of(num_groups)))
    np.testing.assert_array_equal(elements(SCALED4.name, matrix, length=length), given[:N])


@pytest.mark.parametrize("format", [FRAGMENTS, BRICKS], ids=lambda f: f.name)
def test_elements_of_fragments(format: Fragments) -> None:
    """Fragments of i32 decode to the packed matrix; the columns that pad the last panel are zeros."""
    given = RNG.integers(-99, 99, (N, 2 * K)).astype(np.int32)
    panels = format.packed(given)
    np.testing.assert_array_equal(format.unpacked(panels), np.pad(given, ((0, format.columns - N), (0, 0))))
    np.testing.assert_array_equal(elements(format.name, panels, length=2 * K), given)


@pytest.mark.parametrize("format", [PANEL_E4M3, FRAGMENTS_E4M3, LANES_E4M3], ids=lambda f: f.name)
def test_elements_of_floats_of_eight_bits(format: Ordered) -> None:
    given = RNG.integers(-99, 99, (N, 2 * K)).astype(np.int32)
    panels = format.packed(given)
    np.testing.assert_array_equal(format.unpacked(panels)[:N], given)
    np.testing.assert_array_equal(elements(format.name, panels, length=2 * K), given)


@pytest.mark.parametrize("format", [FRAGMENTS, BRICKS], ids=lambda f: f.name)
def test_what_a_line_of_fragments_holds(format: Fragments) -> None:
    size = format.columns * format.depth
    numbers = np.arange(2 * size, dtype=np.int32).reshape(format.columns, 2 * format.depth)
    line = DimVar("line", 0, Dim.of(size - 1))
    column, neighbour = format.column_and_k(line.dim)
    held = [(column.evaluate({line: i}), neighbour.evaluate({line: i})) for i in range(size)]
    np.testing.assert_array_equal(format.packed(numbers)[0, 1], [numbers[n, format.depth + k] for n, k in held])


def test_a_brick_is_8_columns_by_16_bytes() -> None:
    """`wgmma` reads weights in bricks, whose distances its descriptor states: 128 bytes along k, 1024 bytes along columns."""
    numbers = np.arange(32 * 64, dtype=np.int32).reshape(32, 64)
    bricks = BRICKS.packed(numbers).reshape(4, 8, 8, 8)
    np.testing.assert_array_equal(bricks[2, 5], numbers[16:24, 40:48])


def test_a_lane_reads_neighbours_of_a_row_for_both_instructions() -> None:
    first, second = FRAGMENTS.chunks(K)
    assert sorted([*first, *second]) == list(range(K))
    np.testing.assert_array_equal(np.stack([first.reshape(4, 4), second.reshape(4, 4)], 1).reshape(-1), np.arange(K))


@pytest.mark.parametrize("format", [FRAGMENTS8, FRAGMENTS4, FRAGMENTS_E2M1, LANES8, LANES4], ids=lambda f: f.name)
def test_integers_in_fragments(format: IntegerFragments) -> None:
    """Numbers that a kernel packs into fragments decode to the same numbers by `element` and by `unpacked`."""
    k, deep = Kernel(), format.depth
    codes = RNG.integers(0, 1 << format.bits, (format.columns, 2 * deep)).astype(np.int32)
    given = TABLES[format.kind].astype(np.int32)[codes] if format.kind in TABLES else codes - format.offset
    panels = np.zeros((1, 2, format.line_bytes), np.uint8)
    w, p = k.array(buffer("w", codes)), k.array(buffer("p", panels))
    with k.nest(p.shape) as (panel, step, line):
        p[panel, step, line] = cast(format.byte(line, lambda n, r: w[n, step * deep + r]), DType.U8)
    run_prim(PrimFunc((w.buffer, p.buffer), 1, k.body()), (codes, panels))
    np.testing.assert_array_equal(format.unpacked(panels), given)
    np.testing.assert_array_equal(elements(format.name, panels, length=2 * deep), given[:N])
