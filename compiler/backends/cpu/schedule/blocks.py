"""How matrix units go through a product: a block of rows, panels beside each other, and the contracted axis in parts.

A unit takes in operands faster than the second cache gives them. So the tiles of a block of rows go through one part of the contracted axis
together, for which a panel's part stays in the first cache; beside many rows several panels do so in turn, for which the part of the rows
stays in the second. Accumulators wait in memory meanwhile. Each part prefetches the one that is read next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.nests import below, loop, named, seq, when
from compiler.backends.cpu.schedule.panels import Claim
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import Stmt, Tile
from compiler.ir.prove import prove_divisible, prove_le
from compiler.machine.products import ProductTile
from compiler.machine.target import LINE_BYTES
from compiler.machine.tiles.product import MatrixUnitOp

MOST_TOGETHER = 8  # panels of a claim: their accumulators are 256 KB beside 256 rows
FEWEST_CLAIMS = 8  # of a block of rows, for threads to share


@dataclass(frozen=True, slots=True)
class Part:
    """Of the contracted axis."""

    begin: Dim
    depth: Dim
    is_last: Dim  # 1 or 0

    @property
    def is_first(self) -> bool:
        return self.begin == Dim.of(0)


@dataclass(frozen=True, slots=True)
class Later:
    """Where what is read later begins."""

    panel: Dim
    begin: Dim


def configuring(tile: ProductTile, rows: int) -> list[Tile]:
    """What readies a matrix unit for tiles of so many rows."""
    op = tile.product(rows)
    return [Tile(op.configuration)] if isinstance(op, MatrixUnitOp) else []


# tiles(panel, io, part): the products of tile `io` of the block of rows.
Tiles = Callable[[Dim, Dim, Part], Sequence[Tile]]
# through(panel, part, later): what a block of rows does with a part of a panel.
Through = Callable[[Dim, Part, Later], Stmt]


@dataclass(frozen=True, slots=True)
class Blocks:
    extent: Dim  # of the contracted axis
    size: int  # of a part
    step: int  # of the contracted axis, that the unit takes at once
    packed: int  # elements of the contracted axis that stand together in a panel, 32 bits of them
    num_columns: Dim
    columns: int  # of a panel
    num_accumulators: int  # of 32 bits for each element of the result

    @property
    def together(self) -> int:
        """Panels for which a block of rows comes once from beyond the second cache; not so many that too few claims are left, or their
        accumulators no longer fit there."""
        claims = self.num_columns.const // (FEWEST_CLAIMS * self.columns) if self.num_columns.is_const else 1
        return max(1, min(MOST_TOGETHER // self.num_accumulators, claims))

    @property
    def whole(self) -> Part:
        return Part(Dim.of(0), self.extent, Dim.of(1))

    def walk(self, claim: Claim, count: Dim, tiles: Tiles) -> Stmt:
        """`count` tiles of rows, through all parts of all panels. Each step of a tile prefetches its share of what is read later."""
        lines_of_step = self.step // self.packed * 4 * self.columns // LINE_BYTES
        lines = ceil_div(lines_of_step, dim_max(count, 1))  # the quotient is computed even where there is no tile to divide among

        def down(panel: Dim, part: Part, later: Later) -> Stmt:
            def tile(io: Dim, share: Dim) -> Stmt:
                return seq(*(self._prefetching(t, later, io * (part.depth // self.step) * share, share) for t in tiles(panel, io, part)))

            return named("share", lines, lines_of_step, lambda share: loop("io", count, lambda io: tile(io, share)))

        return self.parts(claim, down)

    def parts(self, claim: Claim, through: Through) -> Stmt:
        """All parts of all panels, in their order."""

        def part(some: Part) -> Stmt:
            return claim.each(lambda panel: self._later(claim, panel, some, lambda later: through(panel, some, later)))

        def beginning(number: Dim) -> Stmt:
            return part(Part(number * size, dim_min(self.extent, size), 1 - dim_min(last - number, 1)))

        size, left, last = Dim.of(self.size), self.extent % self.size, ceil_div(self.extent, self.size) - 1
        parts = [beginning(Dim.of(0))]
        if not prove_le(self.extent, 2 * size - 1):
            parts.append(loop("rb", dim_max(self.extent // size - 1, 0), lambda rb: beginning(rb + 1)))
        if not prove_divisible(self.extent, self.size) and not prove_le(self.extent, size):
            rest = Part(self.extent - left, left, Dim.of(1))
            parts.append(when(below(0, left * dim_min(self.extent // size, 1)), part(rest)))
        return seq(*parts)

    def _later(self, claim: Claim, panel: Dim, part: Part, body: Callable[[Later], Stmt]) -> Stmt:
        """What is read after a part of a panel: of the next panel, or the next part of the first one, or of the panel behind the claim."""
        last_panel = ceil_div(self.num_columns, self.columns) - 1

        def known(at_end: Dim) -> Stmt:
            first = claim.panel + part.is_last * claim.num_panels
            begin = part.begin + at_end * (1 - part.is_last) * part.depth - at_end * part.is_last * part.begin
            chosen = dim_min(at_end * first + (1 - at_end) * (panel + 1), last_panel)
            return named("later", chosen, last_panel, lambda p: body(Later(p, begin)))

        return named("at_end", 1 - dim_min(claim.panel + claim.num_panels - 1 - panel, 1), 1, known)

    def _prefetching(self, tile: Tile, later: Later, first: Dim, lines: Dim) -> Tile:
        """The tile, prefetching so many lines of what is read later in each step."""
        right = tile.operands[2]
        ahead = Load(right.buffer, (*right.indices[:-3], later.panel, later.begin // self.packed, Dim.of(0)))
        assert isinstance(tile.op, MatrixUnitOp), tile.op
        return replace(tile, op=replace(tile.op, prefetching=True), operands=(*tile.operands, ahead), dims=(*tile.dims, first, lines))
