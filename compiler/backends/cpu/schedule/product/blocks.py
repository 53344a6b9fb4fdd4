"""How matrix units go through a product: a block of rows, panels beside each other, and the contracted axis in parts.

A unit takes in operands faster than the second cache gives them. So the tiles of a block of rows go through one part of the contracted axis
together, for which a panel's part stays in the first cache; beside many rows several panels do so in turn, for which the part of the rows
stays in the second. Accumulators wait in memory meanwhile. Each part prefetches the one that is read next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.product.panels import Claim, Tiles
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Kernel, less
from compiler.ir.prove import prove_divisible, prove_le
from compiler.machine.intrinsics.product import MatrixUnitOp, ProductOp
from compiler.machine.products import ProductTile
from compiler.machine.target import LINE_BYTES

MOST_TOGETHER = 8  # panels of a claim: their accumulators are 256 KB beside 256 rows
FEWEST_CLAIMS = 8  # of a block of rows, for threads to share


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the contracted axis."""

    begin: Dim
    depth: Dim

    @property
    def is_first(self) -> bool:
        return self.begin == ZERO


@dataclass(frozen=True, slots=True)
class Later:
    """The beginning of the part that is read next."""

    panel: Dim
    begin: Dim


@dataclass(frozen=True, slots=True)
class Ahead:
    """Prefetch `lines` cache lines in each step of a tile, from line `first` of the part that is read next."""

    panel: Dim
    index: Dim  # in the panel, where the part that is read next begins
    first: Dim
    lines: Dim


@dataclass(frozen=True, slots=True)
class Blocks:
    extent: Dim  # of the contracted axis
    tile: ProductTile
    num_columns: Dim
    num_accumulators: int  # words of 32 bits that each element of the result needs

    @property
    def size(self) -> int:
        """The extent of a part."""
        assert self.tile.block is not None, self.tile
        return self.tile.block

    @property
    def together(self) -> int:
        """The number of panels that share one read of a block of rows from beyond the second cache. It is bounded: claims must suffice for
        all threads, and the accumulators must fit into the second cache."""
        claims = self.num_columns.const // (FEWEST_CLAIMS * self.tile.shape.columns) if self.num_columns.is_const else 1
        return max(1, min(MOST_TOGETHER // self.num_accumulators, claims))

    def tiles(self, k: Kernel, tiles: Tiles) -> Iterator[tuple[TileOrigin, Part, Ahead]]:
        """Walk over the tiles, once for each part of each panel. Each step of a tile prefetches its share of the part that is read next."""
        packed = self.tile.format.depth
        lines_of_step = self.tile.depth // packed * 4 * self.tile.shape.columns // LINE_BYTES
        lines = ceil_div(lines_of_step, dim_max(tiles.count, 1))  # the quotient is computed even where there is no tile to divide among
        for panel, part, later in self.parts(k, tiles.claim):
            share = k.let("share", lines, lines_of_step)
            with k.serial("io", tiles.count) as io:
                first = io * (part.depth // self.tile.depth) * share
                ahead = Ahead(later.panel, later.begin // packed, first, share)
                yield tiles.claim.tile(panel, tiles.first + io * tiles.rows, tiles.rows), part, ahead

    def parts(self, k: Kernel, claim: Claim) -> Iterator[tuple[Dim, Part, Later]]:
        """Yield all parts of all panels in order: the panel, the part, and the part that is read next. The body of a `for` is written three
        times: for the first part, for the following parts, and for a shorter last part."""
        size, left, last = Dim.of(self.size), self.extent % self.size, ceil_div(self.extent, self.size) - 1
        yield from self._panels(k, claim, Part(ZERO, dim_min(self.extent, size)), 1 - dim_min(last, 1))
        if not prove_le(self.extent, 2 * size - 1):
            with k.serial("rb", dim_max(self.extent // size - 1, 0)) as rb:
                number = rb + 1
                yield from self._panels(k, claim, Part(number * size, dim_min(self.extent, size)), 1 - dim_min(last - number, 1))
        if not prove_divisible(self.extent, self.size) and not prove_le(self.extent, size):
            with k.when(less(0, left * dim_min(self.extent // size, 1))):
                yield from self._panels(k, claim, Part(self.extent - left, left), Dim.of(1))

    def _panels(self, k: Kernel, claim: Claim, part: Part, is_last: Dim) -> Iterator[tuple[Dim, Part, Later]]:
        """Yield one part of each panel. The part that is read next is the same part of the next panel;
        behind the last panel, the next part of the first panel; behind the last part, the first part of the panel behind the claim."""
        last_panel = ceil_div(self.num_columns, self.tile.shape.columns) - 1
        with k.scope(), claim.panels(k) as panel:
            at_end = k.let("at_end", 1 - dim_min(claim.panel + claim.num_panels - 1 - panel, 1), 1)
            first = claim.panel + is_last * claim.num_panels
            chosen = dim_min(at_end * first + (1 - at_end) * (panel + 1), last_panel)
            begin = part.begin + at_end * (1 - is_last) * part.depth - at_end * is_last * part.begin
            yield panel, part, Later(k.let("later", chosen, last_panel), begin)


def configure(k: Kernel, tile: ProductTile, rows: int) -> None:
    """Configure a matrix unit for tiles of this many rows."""
    op = tile.product(rows)
    if isinstance(op, MatrixUnitOp):
        k.tile(op.configuration)


def multiply(k: Kernel, op: ProductOp, sums: Load, rows: Load, columns: Load, part: Part, stride: Dim, ahead: Ahead | None = None) -> None:
    """Add the products of a part of the contracted axis. `stride`: elements from one row to the next."""
    if ahead is None:
        k.tile(op, sums, rows, columns, dims=(part.depth, stride))
    else:
        assert isinstance(op, MatrixUnitOp), op
        later = Load(columns.buffer, (*columns.indices[:-3], ahead.panel, ahead.index, ZERO))
        k.tile(replace(op, prefetching=True), sums, rows, columns, later, dims=(part.depth, stride, ahead.first, ahead.lines))
