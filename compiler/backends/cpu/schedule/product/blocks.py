"""The loops of a matrix unit over a product: blocks of rows, adjacent panels, and the contracted axis k in parts. A claim is the work that
a thread takes at a time: a block of rows with one or more adjacent panels (panels.py).

A matrix unit reads its operands faster than the second-level cache delivers them. So all tiles of a block of rows compute one part of k
before the next part, while that part of a panel stays in the first-level cache. With many rows, the same part of k is computed for several
panels, one after another, while that part of the rows stays in the second-level cache. Accumulators are in memory between parts. While a
part is multiplied, the part that is read next is prefetched.
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
from compiler.machine.intrinsics.amx import TILE_ROWS
from compiler.machine.intrinsics.product import LINES_AT_ONCE, MatrixUnitOp, ProductOp
from compiler.machine.products import ProductTile
from compiler.machine.target import LINE_BYTES

UNIT_BLOCK_ROWS = 512  # maximum number of rows of a block on a matrix unit; they share one read of a panel into the first-level cache
MOST_TOGETHER = 8  # maximum number of panels of a claim; with UNIT_BLOCK_ROWS rows, their accumulators take 512 KB
FEWEST_CLAIMS = 4  # minimum number of claims per block of rows, if there are so many panels; threads can then share the work


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the contracted axis."""

    begin: Dim
    depth: Dim

    @property
    def is_first(self) -> bool:
        return self.begin == ZERO


@dataclass(frozen=True, slots=True)
class NextPart:
    """The part of a panel that is read next, to be prefetched: the panel, and the index along k at which the part begins."""

    panel: Dim
    begin: Dim


@dataclass(frozen=True, slots=True)
class LinesAhead:
    """The cache lines that a tile prefetches from the part that is read next. The first step of the tile prefetches `lines` lines from line
    `first` of that part on, and each further step prefetches the next `lines` lines. `first` and `lines` are multiples of LINES_AT_ONCE."""

    panel: Dim
    index: Dim  # index, on the second last axis of the packed panels, at which the part that is read next begins
    first: Dim
    lines: Dim


@dataclass(frozen=True, slots=True)
class Blocks:
    """The loops of a claim over the parts of k."""

    extent: Dim  # extent of the contracted axis
    tile: ProductTile
    num_columns: Dim
    num_accumulators: int  # number of 32-bit accumulators per element of the result

    @property
    def size(self) -> int:
        """The number of elements of a part of the contracted axis."""
        assert self.tile.block is not None, self.tile
        return self.tile.block

    @property
    def together(self) -> int:
        """The maximum number of panels of a claim, which share one read of a block of rows into the second-level cache. More panels would
        leave too few claims for all threads, or accumulators that do not fit the second-level cache. The number is 1 if the number of
        columns is not known at compile time."""
        claims = self.num_columns.const // (FEWEST_CLAIMS * self.tile.shape.columns) if self.num_columns.is_const else 1
        return max(1, min(MOST_TOGETHER // self.num_accumulators, claims))

    def tiles(self, k: Kernel, tiles: Tiles) -> Iterator[tuple[TileOrigin, Part, LinesAhead]]:
        """Yield each tile once for each part of each panel, with this part, and with the lines that the tile prefetches from the next
        part."""
        packed = self.tile.format.depth
        lines_of_step = self.tile.depth // packed * 4 * self.tile.shape.columns // LINE_BYTES
        # The kernel computes this quotient even if there are no tiles, so the divisor must not be 0.
        lines = ceil_div(lines_of_step, dim_max(tiles.count, 1) * LINES_AT_ONCE) * LINES_AT_ONCE
        for panel, part, later in self.parts(k, tiles.claim):
            share = k.let("share", lines, lines_of_step)
            with k.serial("io", tiles.count) as io:
                first = io * (part.depth // self.tile.depth) * share
                ahead = LinesAhead(later.panel, later.begin // packed, first, share)
                yield tiles.claim.tile(panel, tiles.first + io * tiles.rows, tiles.rows), part, ahead

    def parts(self, k: Kernel, claim: Claim) -> Iterator[tuple[Dim, Part, NextPart]]:
        """Yield the parts of k in order, and each part once for each panel of the claim: the panel, the part, and the part that is read
        next. The caller's `for` emits its code up to three times: for the first part, in a loop over the later parts of full size, and for
        a shorter last part."""
        size, left, last = Dim.of(self.size), self.extent % self.size, ceil_div(self.extent, self.size) - 1
        yield from self._panels(k, claim, Part(ZERO, dim_min(self.extent, size)), 1 - dim_min(last, 1))
        if not prove_le(self.extent, 2 * size - 1):
            with k.serial("rb", dim_max(self.extent // size - 1, 0)) as rb:
                number = rb + 1
                yield from self._panels(k, claim, Part(number * size, dim_min(self.extent, size)), 1 - dim_min(last - number, 1))
        if not prove_divisible(self.extent, self.size) and not prove_le(self.extent, size):
            with k.when(less(0, left * dim_min(self.extent // size, 1))):
                yield from self._panels(k, claim, Part(self.extent - left, left), Dim.of(1))

    def _panels(self, k: Kernel, claim: Claim, part: Part, is_last: Dim) -> Iterator[tuple[Dim, Part, NextPart]]:
        """Yield one part of k for each panel, together with the part that is read next. The part that is read next is the same part of the
        next panel. After the last panel, it is the next part of the first panel. After the last part of the last panel, it is the first
        part of the panel that follows the claim, or of the product's last panel if none follows. `is_last` is 1 if `part` is the last part,
        otherwise 0."""
        last_panel = ceil_div(self.num_columns, self.tile.shape.columns) - 1
        with k.scope(), claim.panels(k) as panel:
            at_end = k.let("at_end", 1 - dim_min(claim.panel + claim.num_panels - 1 - panel, 1), 1)
            first = claim.panel + is_last * claim.num_panels
            chosen = dim_min(at_end * first + (1 - at_end) * (panel + 1), last_panel)
            begin = part.begin + at_end * (1 - is_last) * part.depth - at_end * is_last * part.begin
            yield panel, part, NextPart(k.let("later", chosen, last_panel), begin)


def configure(k: Kernel, tile: ProductTile, rows: int) -> None:
    """Configure the matrix unit for tiles of this many rows. Do nothing if the tile runs on vectors."""
    op = tile.product(rows)
    if isinstance(op, MatrixUnitOp):
        k.tile(op.configuration)


def configure_counted(k: Kernel, tile: ProductTile, num_rows: Dim) -> None:
    """Configure the matrix unit for tiles whose number of rows is known only at run time."""
    op = tile.product(tile.shape.rows, counted=True)
    assert isinstance(op, MatrixUnitOp), op
    k.tile(op.configuration, dims=(num_rows,))


@dataclass(frozen=True, slots=True)
class Heights:
    """All tiles of a claim's block of rows on a matrix unit: those of full height, and the tile of the remaining rows."""

    claim: Claim
    tile: ProductTile

    def configure(self, k: Kernel) -> None:
        """Configure the matrix unit for the first tiles that `each` yields."""
        full = self.claim.full_tiles
        with k.when(full.exist):
            configure(k, self.tile, full.rows)
        with k.orelse():
            configure_counted(k, self.tile, self.claim.end - self.claim.first)

    def each(self, k: Kernel, panel: Dim) -> Iterator[TileOrigin]:
        """Yield the tiles of a panel. The caller's `for` emits its code once for the tiles of full height, and up to twice for the
        remaining rows (`Claim.remainders`). If the block has tiles of both kinds, the unit is configured before each kind, because each
        kind needs another configuration."""
        full = self.claim.full_tiles
        rest = (self.claim.end - self.claim.first) % full.rows
        several = less(0, full.count) & less(0, rest)
        with k.when(full.exist):
            with k.when(several):
                configure(k, self.tile, full.rows)
            with full.first_rows(k) as row:
                yield self.claim.tile(panel, row, full.rows)
        for remainder in self.claim.remainders(k, TILE_ROWS):
            with k.when(several):
                configure_counted(k, self.tile, remainder.num_rows)
            yield remainder.tile(panel)


def multiply(
    k: Kernel,
    op: ProductOp,
    sums: Load,
    rows: Load,
    columns: Load,
    part: Part,
    stride: Dim,
    *,
    ahead: LinesAhead | None = None,
    height: Dim | None = None,
) -> None:
    """Add the products of a part of the contracted axis to `sums`, or overwrite `sums` if `op` is fresh. `stride` is the number of elements
    from one row to the next. `ahead` are lines that a matrix unit's product prefetches. `height` is the number of rows if `op` reads it at
    run time (`counted`)."""
    if ahead is None:
        k.tile(op, sums, rows, columns, dims=(part.depth, stride, *(() if height is None else (height,))))
    else:
        assert isinstance(op, MatrixUnitOp) and height is None, op
        later = Load(columns.buffer, (*columns.indices[:-3], ahead.panel, ahead.index, ZERO))
        k.tile(
            replace(op, prefetching=True, in_block=True), sums, rows, columns, later, dims=(part.depth, stride, ahead.first, ahead.lines)
        )
