"""The tiles that multiply matrices, in tables with the best tile of each kind first.

A tile multiplies rows of one element type by weights of one format. Its order of summation does not depend on its number of rows. Tiles
that use vectors have a column in each lane; their accumulators, the columns of a step and one factor of a row fit the registers. Code
generation splits or joins vectors to the width of registers. So products of f32, and products of integers without a matrix unit, have the
same order of summation on all CPUs. Products of bf16, products on matrix units and products on GPUs have orders of their own
(compiler/numeric_class.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Contraction, Element, Format, Load, Scalar, without_cast
from compiler.ir.numbers import Kind
from compiler.ir.prove import prove_divisible
from compiler.machine.formats import (
    PAIRS,
    PANEL4,
    PANEL6,
    PANEL8,
    PANEL8_WORDS,
    PANEL_E4M3,
    SCALED4,
    TABLE_PANELS,
    WIDENED4,
    Ordered,
    ScaledPanels,
    TablePanels,
)
from compiler.machine.intrinsics.amx import AmxBf16, AmxI8ByI8, AmxI8ByU8
from compiler.machine.intrinsics.base import NONE, Features
from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.intrinsics.decode_e4m3 import DecodeE4m3
from compiler.machine.intrinsics.dot_bf16 import DotBf16
from compiler.machine.intrinsics.dot_e4m3 import DotE4m3
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.intrinsics.dot_widened import DotWidened
from compiler.machine.intrinsics.mma import Mma
from compiler.machine.intrinsics.product import MatrixUnitOp, ProductOp
from compiler.machine.intrinsics.wgmma import Wgmma
from compiler.machine.intrinsics.widen_panel import STRETCH, WidenPanel
from compiler.machine.target import GPU, Target

LANES: Final = 16


@dataclass(frozen=True, slots=True)
class TileShape:
    """The shape of a tile: `rows` times (`vectors` * `lanes`) accumulators. In the tables below, `rows` is a power of two."""

    rows: int
    vectors: int
    lanes: int = LANES

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes


@dataclass(frozen=True, slots=True)
class FloatTile:
    """A tile that multiplies and adds vectors of f32."""

    shape: TileShape
    steps: int = 4  # maximum number of unrolled steps along k; steps share decoded values, but each needs registers for its columns


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A tile that multiplies rows of type `op.row_dtype` by weights of one format."""

    op: ProductOp  # the operation, with the largest number of rows that a tile may have if rows have `planes` planes
    format: Format  # format of the weights
    depth: int  # elements along k that a step multiplies; k, or each group of weights with one scale, must be a multiple of this number
    # Number of planes per row for which registers suffice. A plane is one of two rows of bytes that together represent a row of 16-bit
    # integers. A tile may have more rows if its rows have fewer planes; if its rows have more planes, the planes of a row share one sum.
    planes: int = 1
    # For matrix units: maximum number of elements along k in a block. All rows multiply the weights of a block before those of the next
    # block. A multiple of `depth`.
    block: int | None = None
    widen: WidenPanel | DecodeE4m3 | None = None  # converts a part of a panel in `format` to the panel that `op` reads
    few: DotWidened | None = None  # multiplies up to `few.rows` rows without widening, with the same sums
    needs: Features = NONE  # features required besides those of `op`: they exclude targets on which `op` would be too slow

    @property
    def shape(self) -> TileShape:
        return TileShape(self.op.rows, self.op.columns // LANES)

    def shape_of(self, num_planes: int) -> TileShape:
        """Return the shape of a tile whose rows have this many planes."""
        return TileShape(self.op.rows * max(1, self.planes // num_planes), self.op.columns // LANES)

    @property
    def rows(self) -> DType:
        """The element type of the rows."""
        return self.op.row_dtype

    @property
    def on_matrix_unit(self) -> bool:
        return isinstance(self.op, MatrixUnitOp)

    def capped(self, rows: int) -> DotPanel | None:
        """Return the operation that adds both planes of a row to one sum. It skips zeros of the upper plane, which is zero except for
        outliers, the numbers that need 16 bits. Return None if a tile sums planes separately, or if its rows have no planes."""
        return replace(self.op, rows=rows, capped=True) if isinstance(self.op, DotPanel) and self.planes == 1 else None

    def product(self, rows: int, *, fresh: bool = False, counted: bool = False) -> ProductOp:
        """Return the operation for this number of rows. With `fresh`, a matrix unit overwrites the result instead of adding to it. With
        `counted`, `rows` is a maximum, and the number of rows is known only at run time. Tiles without a matrix unit ignore `fresh` and
        `counted`."""
        if isinstance(self.op, MatrixUnitOp):
            return replace(self.op, rows=rows, fresh=fresh, counted=counted)
        return replace(self.op, rows=rows)

    def takes(self, s: Contraction, row_axis: DimVar | None) -> bool:
        """Return whether the tile can read the rows of the contraction (`takes_rows`), and whether the columns are in memory in the tile's
        element type, so that they can be packed for the tile."""
        return self.factors(s) is not None and self.takes_rows(s, row_axis)

    def takes_rows(self, s: Contraction, row_axis: DimVar | None) -> bool:
        """Return whether the tile can read the rows of the contraction: they are in memory in the tile's element type, their elements along
        k are adjacent, and k is a multiple of `depth`. If `row_axis` is not None, one index of the rows must be this variable, and no other
        index may contain it. The columns do not matter."""
        rows = self._in_memory(s.rows)
        if rows is None or not prove_divisible(s.extent, self.depth):
            return False
        (*before, last), axis = rows.indices, s.axes[0][0]
        if last.var is not axis or any(axis in d.vars() for d in before):
            return False
        return row_axis is None or [d.var for d in before if row_axis in d.vars()] == [row_axis]

    def factors(self, s: Contraction) -> tuple[Load, Load] | None:
        """Return the loads of the rows and of the columns. Return None if either is not in memory in the tile's element type."""
        rows, columns = (self._in_memory(x) for x in (s.rows, s.columns))
        return None if rows is None or columns is None else (rows, columns)

    def _in_memory(self, factor: Scalar) -> Load | None:
        """Return the load of a factor, without casts and decoding. Return None if the factor is no load, or if its buffer has another
        element type than the tile's rows."""
        element = without_cast(factor)
        load = element.stored[0] if isinstance(element, Element) else element
        return load if isinstance(load, Load) and load.buffer.dtype is self.rows else None

    def reads(self, factor: Scalar) -> bool:
        """Return whether the columns are already packed in panels of the tile's format and width, with 32 bits of each column adjacent, or
        in `ScaledPanels` that consist of such panels."""
        element = without_cast(factor)
        if isinstance(element, Element) and isinstance(element.format, ScaledPanels):
            return element.format.panels is self.format and element.format.columns == self.op.columns
        if not isinstance(element, Element) or element.format is not self.format:
            return False
        panels = element.buffers[0]
        return panels.shape[-1] * panels.dtype.num_bytes == Dim.of(self.shape.columns * 4)

    def widens(self, length: int, group: int) -> bool:
        """Return whether the tile can widen columns of `length` weights in groups of `group`: it widens at all, `length` is a multiple of
        `depth`, and a group is a multiple of STRETCH. A block must hold whole groups. A column with a single group is not widened."""
        if not isinstance(self.widen, WidenPanel) or self.block is None:
            return False
        return length % self.depth == 0 and group < length and group % STRETCH == 0 and self.block % group == 0

    def runs_on(self, target: Target) -> bool:
        """Return whether the target has all operations of the tile and the features in `needs`."""
        tiles = [tile for tile in (self.op, self.widen, self.few) if tile is not None]
        return self.needs <= target.features and all(tile.runs_on(target) for tile in tiles)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tiles of one target."""

    floats: FloatTile
    attention: FloatTile  # the tile that multiplies queries by keys, and attention weights by values
    tiles: tuple[ProductTile, ...]
    scaled_panels: ScaledPanels | None = None  # the format that puts scales after the weights of their group; None: another buffer has them

    @property
    def pairs(self) -> ProductTile | None:
        """The best tile that multiplies bf16. None on targets where f32 is faster (docs/decisions/0008-where-bf16-is-multiplied.md)."""
        return next(iter(self.all_pairs), None)

    @property
    def all_pairs(self) -> tuple[ProductTile, ...]:
        """The tiles that multiply bf16, the best first."""
        return tuple(t for t in self.tiles if t.rows is DType.BF16 and t.format.bits == 16)

    @property
    def scaled(self) -> tuple[ProductTile, ...]:
        """The tiles that multiply rows of bf16 by integers, or by floats of 8 or 4 bits; each group of weights has a scale."""
        return tuple(t for t in self.tiles if t.rows is DType.BF16 and t.format.bits < 16)

    @property
    def integers(self) -> tuple[ProductTile, ...]:
        """The tiles that multiply rows of integers by weights without widening them. For each column, a row has one accumulator of f32 that
        adds up the groups, and one integer accumulator per plane, or one for both planes (`ProductTile.capped`)."""
        return tuple(t for t in self.tiles if t.rows.is_int and t.widen is None)

    @property
    def widened(self) -> ProductTile | None:
        """The tile that widens 4-bit weights to 8 bits for a matrix unit. None if the target has none."""
        return next((t for t in self.tiles if isinstance(t.widen, WidenPanel)), None)

    @property
    def on_matrix_unit(self) -> bool:
        return any(t.on_matrix_unit for t in self.tiles)

    @property
    def shapes_of_rows(self) -> tuple[int, ...]:
        """The numbers of rows, in increasing order, for which a GPU's tiles use instructions of different shapes. Empty on CPUs, and if one
        shape serves all numbers of rows."""
        ops = [t.op for t in self.tiles if isinstance(t.op, BlockProduct) and not t.op.one_shape]
        return tuple(sorted({height for op in ops for height in op.heights(in_groups=False)}))


# (least width in bits of the target's vectors, shape)
_SHAPES: Final = (
    (512, TileShape(rows=8, vectors=2)),  # 16 accumulators in 32 registers
    (128, TileShape(rows=4, vectors=1)),  # 8 accumulators in 16 registers of 256 bits, or 16 in 32 registers of 128 bits
)
# Engines of WebAssembly on x86 have 16 registers of 128 bits. This shape uses 14 of them: for 8 accumulators, the columns of two steps, and
# two factors. In attention, a vector has one lane per key of a page: 8 accumulators are two rows, and the other registers suffice for the
# keys of one step.
_NARROW: Final = FloatTile(TileShape(rows=4, vectors=1, lanes=8), steps=2)
_NARROW_ATTENTION: Final = FloatTile(TileShape(rows=2, vectors=1), steps=1)
# The operations of the narrowest targets for each kind of weights of up to 4 bits, each with the format of its weights.
_PANELS4: Final = (
    (DotPanel(rows=2, columns=16, bits=4), PANEL4),
    *((DotPanel(rows=2, columns=16, bits=format.bits, kind=kind), format) for kind, format in TABLE_PANELS.items()),
)
# (least width in bits of the target's vectors, tile)
_TILES: Final = (
    (512, ProductTile(AmxBf16(rows=32, columns=32), format=PAIRS, depth=32, block=512)),
    (512, ProductTile(DotBf16(rows=8, columns=32), format=PAIRS, depth=2, needs=Features(["avx512bf16", "sse4a"]))),
    (
        512,
        ProductTile(
            AmxI8ByI8(32, 32, cached_panel=True),
            WIDENED4,
            depth=64,
            block=1024,
            widen=WidenPanel(columns=32, group=STRETCH),
            few=DotWidened(rows=1, columns=32, group=STRETCH),
        ),
    ),
    (
        512,
        ProductTile(AmxBf16(32, 32, cached_panel=True), PANEL_E4M3, depth=32, block=256, widen=DecodeE4m3(PANEL_E4M3.columns)),
    ),
    (512, ProductTile(DotPanel(rows=4, columns=32, bits=6), format=PANEL6, depth=16, planes=2)),
    (512, ProductTile(AmxI8ByU8(rows=16, columns=32), format=PANEL8, depth=64, block=1024)),
    (512, ProductTile(DotPanel(rows=4, columns=32, bits=8), format=PANEL8, depth=4, planes=2)),
    *(
        (512, ProductTile(replace(op, rows=rows, columns=32), format, depth=4, needs=needs))
        for rows, needs in ((8, Features(["avx512vnni"])), (4, NONE))  # sums of 16 bits need further registers without VNNI
        for op, format in _PANELS4
    ),
    (512, ProductTile(DotWords(rows=8, columns=32), format=PANEL8_WORDS, depth=4)),
    (512, ProductTile(DotE4m3(rows=8, columns=32), format=PANEL_E4M3, depth=4)),
    (128, ProductTile(DotPanel(rows=2, columns=16, bits=8), format=PANEL8, depth=4, planes=2)),
    *((128, ProductTile(op, format, depth=4)) for op, format in _PANELS4),
    (128, ProductTile(DotWords(rows=4, columns=16), format=PANEL8_WORDS, depth=4)),
)
# The tiles of GPUs; schedules choose other numbers of rows and columns. A product uses the first tile that fits it.
_GPU_TILES: Final = tuple(
    ProductTile(op, op.format, depth=op.step)
    for tile in (Wgmma(rows=128, columns=128), Mma(rows=64, columns=128))
    for op in (replace(tile, bits=bits, kind=kind) for bits, kind in tile.formats)
)


@lru_cache
def product_tiles(target: Target) -> ProductTiles:
    """Return the tiles of a target: those of GPUs, or the best ones of a CPU or of WebAssembly for each kind of weights."""
    shape = next(shape for least, shape in _SHAPES if target.vector_bits >= least)
    narrow = "simd128" in target.features
    tiles = tuple(t for t in _GPU_TILES if t.runs_on(target)) if target.system == GPU else tuple(_best(target))
    if narrow:
        return ProductTiles(_NARROW, _NARROW_ATTENTION, tiles, SCALED4)
    return ProductTiles(FloatTile(shape), FloatTile(shape), tiles)


def _best(target: Target) -> Iterator[ProductTile]:
    """For each kind of weights, yield the best tile on the matrix unit and the best other tile, if the target has such tiles. Integers with
    the same number of bits are one kind, even if their formats differ."""
    found: set[tuple[int, Kind | bool, bool]] = set()
    for least, tile in _TILES:
        numbers = tile.format.kind if isinstance(tile.format, TablePanels) else isinstance(tile.format, Ordered)
        kind = tile.format.bits, numbers, tile.on_matrix_unit
        if kind not in found and target.vector_bits >= least and tile.runs_on(target):
            found.add(kind)
            yield tile
