"""The walk over the result of a product: panels of columns, blocks of rows, tiles of rows.

Threads claim one panel and one block of rows at a time. The rows of a block are taken in tiles of `rows`, and the rest in tiles of the
powers of two that make it up: so every row is in some tile, and which one may not matter to its bits. What a tile does is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min
from compiler.ir.loops import Stmt
from compiler.schedule.nests import PerfectNest, below, loop, named, parallel, product_of, seq, unravel, when

BLOCK_ROWS = 256  # rows that share one visit to a panel: their slab of the left operand stays in the second-level cache

# kernel(point, panel, first_row, rows): the values of the other axes, then the tile; `rows` is a power of two.
Kernel = Callable[[dict[DimVar, Dim], Dim, Dim, int], Stmt]
# several(point, panel, first_row, rows, count): so many tiles one below the other, BLOCK_ROWS rows at most.
Several = Callable[[dict[DimVar, Dim], Dim, Dim, int, Dim], Stmt]


@dataclass(frozen=True, slots=True)
class Panels:
    """The innermost axis of `nest` in panels of `columns`; `row_axis`, if there is one, in tiles of at most `rows`, a power of two."""

    nest: PerfectNest
    row_axis: DimVar | None
    columns: int
    rows: int

    def walk(self, kernel: Kernel, several: Several | None = None) -> Stmt:
        def in_turn(point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int, count: Dim) -> Stmt:
            return loop("io", count, lambda io: kernel(point, panel, first + io * rows, rows))

        row, extents = self.row_axis, dict(self.nest.axes)
        panels = ceil_div(extents[self.nest.vars[-1]], self.columns)
        outer = [(v, e) for v, e in self.nest.axes[:-1] if v is not row]
        num_rows = extents[row] if row is not None else Dim.of(1)
        blocks = ceil_div(num_rows, BLOCK_ROWS)

        def item(p: Dim) -> Stmt:
            """One panel and one block of rows; neighbours in `p` share the panel."""

            def start(place: list[Dim]) -> Stmt:
                *at, panel, block = place
                point = dict(zip((v for v, _ in outer), at, strict=True))
                first, end = block * BLOCK_ROWS, dim_min(num_rows, block * BLOCK_ROWS + BLOCK_ROWS)
                return named("end", end, num_rows, lambda end: self._block(kernel, several or in_turn, (point, panel), (first, end)))

            return unravel(p, [(v.name, e) for v, e in outer] + [("panel", panels), ("block", blocks)], start)

        return parallel("p", product_of([e for _, e in outer]) * panels * blocks, item)

    def _block(self, kernel: Kernel, several: Several, place: tuple[dict[DimVar, Dim], Dim], span: tuple[Dim, Dim]) -> Stmt:
        (first, end), most = span, self.rows
        full = several(*place, first, most, (end - first) // most)
        left = (end - first) % most
        tails: list[Stmt] = []
        size = most // 2
        while size:
            start = end - left + left // (2 * size) * (2 * size)
            tails.append(when(below(0, left // size % 2), kernel(*place, start, size)))
            size //= 2
        return seq(full, *tails)
