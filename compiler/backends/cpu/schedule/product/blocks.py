"""The walk of a matrix unit through a product: blocks of rows, neighbouring panels, and the contracted axis in parts.

A unit consumes operands faster than the second-level cache delivers them. So all tiles of a block of rows process one part of the
contracted axis before the next part, while that part of a panel stays in the first-level cache. With many rows, each part is processed for
several panels in turn, while the part of the rows stays in the second-level cache. Accumulators are in memory between parts. Each part
prefetches the part that is read next.
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

MOST_TOGETHER = 8  # largest number of panels of a claim; with 256 rows, their accumulators take 256 KB
FEWEST_CLAIMS = 8  # smallest number of claims into which a block of rows is divided, so that threads share the work


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
    """The panel of the part that is read next, and the element where that part begins."""

    panel: Dim
    begin: Dim


@dataclass(frozen=True, slots=True)
class Ahead:
    """Cache lines to prefetch in each step of a tile: `lines` lines, from line `first` of the part that is read next."""

    panel: Dim
    index: Dim  # index in the panel at which the part that is read next begins
    first: Dim
    lines: Dim


@dataclass(frozen=True, slots=True)
class Blocks:
    extent: Dim  # extent of the contracted axis
    tile: ProductTile
    num_columns: Dim
    num_accumulators: int  # number of 32-bit accumulators that each element of the result needs

    @property
    def size(self) -> int:
        """The extent of a part of the contracted axis."""
        assert self.tile.block is not None, self.tile
        return self.tile.block

    @property
    def together(self) -> int:
        """The number of panels that share one read of a block of rows from beyond the second-level cache. It is bounded, because there must
        be enough claims for all threads, and the accumulators must fit into the second-level cache."""
        claims = self.num_columns.const // (FEWEST_CLAIMS * self.tile.shape.columns) if self.num_columns.is_const else 1
        return max(1, min(MOST_TOGETHER // self.num_accumulators, claims))

    def tiles(self, k: Kernel, tiles: Tiles) -> Iterator[tuple[TileOrigin, Part, Ahead]]:
        """Yield each tile, once for each part of each panel. Each step of a tile prefetches its share of the part that is read next."""
        packed = self.tile.format.depth
        lines_of_step = self.tile.depth // packed * 4 * self.tile.shape.columns // LINE_BYTES
        # This is computed even if there are no tiles, so the divisor must not become 0.
        lines = ceil_div(lines_of_step, dim_max(tiles.count, 1))
        for panel, part, later in self.parts(k, tiles.claim):
            share = k.let("share", lines, lines_of_step)
            with k.serial("io", tiles.count) as io:
                first = io * (part.depth // self.tile.depth) * share
                ahead = Ahead(later.panel, later.begin // packed, first, share)
                yield tiles.claim.tile(panel, tiles.first + io * tiles.rows, tiles.rows), part, ahead

    def parts(self, k: Kernel, claim: Claim) -> Iterator[tuple[Dim, Part, Later]]:
        """Yield all parts of all panels in order: the panel, the part, and the part that is read next. The body of the caller's `for` is
        written three times: for the first part, for the following parts, and for a shorter last part."""
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
        """Yield one part of each panel, with the part that is read next: the same part of the next panel; after the last panel, the next
        part of the first panel; after the last part, the first part of the first panel after the claim."""
        last_panel = ceil_div(self.num_columns, self.tile.shape.columns) - 1
        with k.scope(), claim.panels(k) as panel:
            at_end = k.let("at_end", 1 - dim_min(claim.panel + claim.num_panels - 1 - panel, 1), 1)
            first = claim.panel + is_last * claim.num_panels
            chosen = dim_min(at_end * first + (1 - at_end) * (panel + 1), last_panel)
            begin = part.begin + at_end * (1 - is_last) * part.depth - at_end * is_last * part.begin
            yield panel, part, Later(k.let("later", chosen, last_panel), begin)


def configure(k: Kernel, tile: ProductTile, rows: int) -> None:
    """Configure the matrix unit for tiles of this many rows. Do nothing without a unit."""
    op = tile.product(rows)
    if isinstance(op, MatrixUnitOp):
        k.tile(op.configuration)


def multiply(k: Kernel, op: ProductOp, sums: Load, rows: Load, columns: Load, part: Part, stride: Dim, ahead: Ahead | None = None) -> None:
    """Add the products of a part of the contracted axis. `stride` is the number of elements from one row to the next."""
    if ahead is None:
        k.tile(op, sums, rows, columns, dims=(part.depth, stride))
    else:
        assert isinstance(op, MatrixUnitOp), op
        later = Load(columns.buffer, (*columns.indices[:-3], ahead.panel, ahead.index, ZERO))
        k.tile(replace(op, prefetching=True), sums, rows, columns, later, dims=(part.depth, stride, ahead.first, ahead.lines))
