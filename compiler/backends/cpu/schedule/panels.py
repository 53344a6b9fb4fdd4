"""The walk over the result of a product: panels of columns, blocks of rows, tiles of rows.

Threads claim one block of rows at a time, and one panel or as many as a schedule wants together: beside many rows, or beside a single
one. The rows of a block are taken in tiles of `rows`, and the rest in tiles of the powers of two that make it up: so every row is in some
tile, and which one may not matter to its bits. What a tile does is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.schedule.nests import below, loop, named, parallel, seq, unravel, when
from compiler.idioms.nest import PerfectNest
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min, product_of
from compiler.ir.loops.statements import Stmt

BLOCK_ROWS = 256  # rows that share one visit to a panel: their slab of the left operand stays in the second-level cache
MANY_ROWS = 64  # from here on panels are taken together: with fewer rows there are few claims, and nothing is read twice


@dataclass(frozen=True, slots=True)
class Claim:
    """The values of the other axes, and panels side by side."""

    point: dict[DimVar, Dim]
    panel: Dim  # the first
    num_panels: Dim

    def each(self, body: Callable[[Dim], Stmt]) -> Stmt:
        if self.num_panels.is_const and self.num_panels.const == 1:
            return body(self.panel)
        return loop("beside", self.num_panels, lambda i: body(self.panel + i))


# kernel(point, panel, first_row, rows): the values of the other axes, then the tile; `rows` is a power of two.
Kernel = Callable[[dict[DimVar, Dim], Dim, Dim, int], Stmt]
# several(claim, first_row, rows, count): so many tiles one below the other, BLOCK_ROWS rows at most.
Several = Callable[[Claim, Dim, int, Dim], Stmt]
# block(claim, first_row, end_row): all of a block of rows, by no others than itself.
Block = Callable[[Claim, Dim, Dim], Stmt]
# across(point, panel, row): the tile of one row that is alone, over `abreast` panels.
Across = Callable[[dict[DimVar, Dim], Dim, Dim], Stmt]


@dataclass(frozen=True, slots=True)
class Height:
    """The tiles of `rows` rows in a block of rows: one below the other from `first` on, or one at the most."""

    rows: int
    first: Dim
    count: Dim
    is_rest: bool

    def each(self, tile: Callable[[Dim], Stmt]) -> Stmt:
        """`tile(first row)`"""
        return tile(self.first) if self.is_rest else loop("io", self.count, lambda io: tile(self.first + io * self.rows))

    def when_any(self, body: Stmt) -> Stmt:
        return when(below(0, self.count), body)


@dataclass(frozen=True, slots=True)
class Panels:
    """The innermost axis of `nest` in panels of `columns`; `row_axis`, if there is one, in tiles of at most `rows`, a power of two."""

    nest: PerfectNest
    row_axis: DimVar | None
    columns: int
    rows: int
    together: int = 1  # panels of a claim, beside many rows
    abreast: int = 1  # the same, beside one row: its sums wait for themselves, or for memory. Not both
    block_rows: int = BLOCK_ROWS

    def walk(self, kernel: Kernel, several: Several | None = None, across: Across | None = None) -> Stmt:
        def in_turn(claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
            return claim.each(lambda panel: loop("io", count, lambda io: kernel(claim.point, panel, first + io * rows, rows)))

        return self.blocks(lambda claim, first, end: self._block(kernel, several or in_turn, across, claim, (first, end)))

    def blocks(self, block: Block) -> Stmt:
        row, extents = self.row_axis, dict(self.nest.axes)
        panels = ceil_div(extents[self.nest.vars[-1]], self.columns)
        outer = [(v, e) for v, e in self.nest.axes[:-1] if v is not row]
        num_rows = extents[row] if row is not None else Dim.of(1)
        blocks = ceil_div(num_rows, self.block_rows)
        alone = 1 - dim_min(num_rows - 1, 1)
        most = 1 + (self.together - 1) * dim_min(num_rows // MANY_ROWS, 1) + (self.abreast - 1) * alone
        groups = ceil_div(panels, most)

        def item(p: Dim) -> Stmt:
            """Some panels and one block of rows; neighbours in `p` share the panels."""

            def start(place: list[Dim]) -> Stmt:
                *at, group, number = place
                point = dict(zip((v for v, _ in outer), at, strict=True))
                first = number * self.block_rows
                end = dim_min(num_rows, first + self.block_rows)

                def claimed(panel: Dim, num_panels: Dim) -> Stmt:
                    claim = Claim(point, panel, num_panels)
                    return named("end", end, num_rows, lambda end: block(claim, first, end))

                def side_by_side(panel: Dim) -> Stmt:
                    return named("panels", dim_min(most, panels - panel), max(self.together, self.abreast), lambda n: claimed(panel, n))

                return named("panel", group * most, panels - 1, side_by_side)

            return unravel(
                p, [(v.name, e) for v, e in outer] + [("panel" if most == Dim.of(1) else "group", groups), ("block", blocks)], start
            )

        return parallel("p", product_of([e for _, e in outer]) * groups * blocks, item)

    def _block(self, kernel: Kernel, several: Several, across: Across | None, claim: Claim, span: tuple[Dim, Dim]) -> Stmt:
        full, *rests = self.heights(*span)

        def rest(height: Height) -> Stmt:
            tail = claim.each(lambda panel: kernel(claim.point, panel, height.first, height.rows))
            if height.rows == 1 and across is not None:
                return when(below(self.abreast - 1, claim.num_panels), across(claim.point, claim.panel, height.first), tail)
            return tail

        return seq(several(claim, full.first, full.rows, full.count), *(height.when_any(rest(height)) for height in rests))

    def heights(self, first: Dim, end: Dim) -> list[Height]:
        """Whole tiles, then the powers of two that make up the rows that fill none."""
        count = end - first
        left = count % self.rows

        def rest(rows: int) -> Height:
            return Height(rows, end - left + left // (2 * rows) * (2 * rows), left // rows % 2, True)

        sizes = [1 << bit for bit in reversed(range(self.rows.bit_length() - 1))]
        return [Height(self.rows, first, count // self.rows, False), *map(rest, sizes)]
