"""Products of weights that are widened from 4 bits to 8 for a matrix unit (ops/widened.py).

A block of rows goes through the contracted axis in parts, as blocks.py has it. Each part of a panel is widened once into memory that stays
in the first cache, and all rows of the block multiply it from there: tiles of `shape.rows`, then the powers of two that make up the rest.
Sums of a channel are exact and wait in memory, so no height of a tile can change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Fn, Load, PrimFunc, Reduce, Scalar, Stmt, Tile
from compiler.ir.visit_loops import map_scalar, rewrite_dims
from compiler.ops.integer import FOUR
from compiler.schedule.blocks import Blocks, Later, Part
from compiler.schedule.integer import number_of
from compiler.schedule.integer_form import GroupedSum, IntegerProduct, Plane, match_integer
from compiler.schedule.nests import allocated, below, loop, seq, when, zero
from compiler.schedule.panels import Claim, Panels
from compiler.schedule.pieces import local
from compiler.schedule.same import same_scalar
from compiler.schedule.spot import Spot, TileShape

BLOCK_ROWS = 512  # widening a panel costs as much as its product with some sixty rows


@dataclass(frozen=True, slots=True)
class WidenedTile:
    """Intrinsics that widen a panel, and that multiply what was widened."""

    widen: str
    intrinsic: str
    configure: str  # tells the unit the height of tiles
    shape: TileShape
    stretch: int  # of k, that is widened at once
    depth: int  # of k, that is multiplied at once
    block: int  # of k, that is widened before it is multiplied

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of groups that lie whole in a part."""
        return tuple(group for group in range(self.stretch, self.block + 1, self.stretch) if self.block % group == 0)

    def takes(self, length: int, group: int) -> bool:
        """A channel of one group is taken as it is."""
        return length % self.depth == 0 and group < length and group in self.groups

    def fits(self, product: IntegerProduct) -> bool:
        planes = [p for s in product.sums for p in s.planes]
        return product.columns == self.shape.columns and all(
            p.multipliers is not None and self.takes(p.group, _group(p, p.multipliers)) for p in planes
        )


def schedule_widened(prim: PrimFunc, tile: WidenedTile) -> PrimFunc | None:
    product = match_integer(prim)
    if product is None or not tile.fits(product):
        return None
    return PrimFunc(prim.params, prim.num_outputs, _Schedule(product, tile).body(), {**prim.attrs, "schedule": "widened"})


@dataclass(frozen=True, slots=True)
class _Schedule:
    product: IntegerProduct
    tile: WidenedTile

    @property
    def sums(self) -> tuple[GroupedSum, ...]:
        return self.product.sums

    def body(self) -> Stmt:
        p, shape = self.product, self.tile.shape
        extent, columns = Dim.of(p.sums[0].planes[0].group), p.nest.axes[-1][1]
        blocks = Blocks(extent, self.tile.block, self.tile.depth, 2 * FOUR, columns, shape.columns, len(p.sums))
        most = 1 if p.row_axis is None else shape.rows
        panels = Panels(p.nest, p.row_axis, shape.columns, most, together=blocks.together, block_rows=BLOCK_ROWS)
        return panels.blocks(lambda claim, first, end: self.block(panels, blocks, claim, (first, end)))

    def block(self, panels: Panels, blocks: Blocks, claim: Claim, span: tuple[Dim, Dim]) -> Stmt:
        (first, end), shape = span, self.tile.shape
        size = (blocks.together, BLOCK_ROWS if panels.row_axis is not None else 1, shape.vectors, shape.lanes)
        exact = [local(f"exact{i}", *size, dtype=DType.I32) for i in range(len(self.sums))]
        wide = [local(f"wide{i}", blocks.size * shape.columns, dtype=DType.I8) for i in range(len(self.sums))]

        def through(panel: Dim, part: Part, later: Later) -> Stmt:
            def tiles(row: Dim, rows: int) -> Stmt:
                place = (panel - claim.panel, row - first, *_CORNER[2:])
                spot = self.spot(claim, panel, row, rows)
                return seq(*(self.tiled(s, spot, Load(e, place), w, part) for s, e, w in zip(self.sums, exact, wide, strict=True)))

            most, count = panels.rows, (end - first) // panels.rows
            widened = [self.widened(s, w, panel, part, later) for s, w in zip(self.sums, wide, strict=True)]
            several = seq(again(most), loop("io", count, lambda io: tiles(first + io * most, most)))
            rests = panels.rests(first, end, lambda row, rows: seq(again(rows), tiles(row, rows)))
            return seq(*widened, when(below(0, count), several), *rests)

        def again(rows: int) -> Stmt:
            """A height has to be told again where there are others between."""
            return when(below(1, num_heights), self.told(rows))

        heights = panels.heights(first, end)
        num_heights = sum((dim_min(there, 1) for _, there in heights), Dim.of(0))
        told = [when(below(0, there), self.told(rows)) for rows, there in heights]

        def finish(m: Dim) -> Stmt:
            return claim.each(lambda panel: self.finished(self.spot(claim, panel, first + m, 1), exact, (panel - claim.panel, m)))

        return allocated([*exact, *wide], seq(*told, blocks.parts(claim, through), loop("m", end - first, finish)))

    def spot(self, claim: Claim, panel: Dim, row: Dim, rows: int) -> Spot:
        return Spot(self.product.nest, self.product.row_axis, replace(self.tile.shape, rows=rows), claim.point, panel, row)

    def told(self, rows: int) -> Tile:
        return Tile(self.tile.configure, (), (), {"rows": rows})

    def widened(self, grouped: GroupedSum, wide: Buffer, panel: Dim, part: Part, later: Later) -> Tile:
        plane = grouped.planes[0]
        multipliers = plane.multipliers
        assert multipliers is not None, plane
        group = _group(plane, multipliers)

        def places(panel: Dim, begin: Dim) -> tuple[Load, Load]:
            return Load(plane.panels, (panel, begin // (2 * FOUR), Dim.of(0))), Load(multipliers, (panel, begin // group, Dim.of(0)))

        operands = (Load(wide, (Dim.of(0),)), *places(panel, part.begin), *places(later.panel, later.begin))
        return Tile(self.tile.widen, operands, (part.depth,), {"columns": self.tile.shape.columns, "group": group})

    def tiled(self, grouped: GroupedSum, spot: Spot, exact: Load, wide: Buffer, part: Part) -> Tile:
        """The first part finds nothing in the exact sums."""
        q = grouped.planes[0].q
        row = tuple(d.substitute(spot.at(*_CORNER[1:])) for d in q.indices[:-2])
        operands = (exact, Load(q.buffer, (*row, Dim.of(0), part.begin)), Load(wide, (Dim.of(0),)))
        attrs = {"rows": spot.shape.rows, "columns": spot.shape.columns, **({"fresh": 1} if part.is_first else {})}
        return Tile(self.tile.intrinsic, operands, (part.depth, q.buffer.shape[-1]), attrs)

    def finished(self, line: Spot, exact: list[Buffer], at: tuple[Dim, Dim]) -> Stmt:
        def one(v: Dim, lane: Dim) -> Stmt:
            place = line.at(Dim.of(0), v, lane)

            def result(scalar: Scalar) -> Scalar:
                number = number_of(self.sums, scalar)
                return scalar if number is None else _scaled(self.sums[number], Load(exact[number], (*at, v, lane)), place)

            return line.store(Dim.of(0), v, lane, result)

        return line.vectors(one)


_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0), Dim.of(0))  # of exact sums by panel, row, vector and lane


def _group(plane: Plane, multipliers: Buffer) -> int:
    return plane.group // multipliers.shape[-2].const


def _scaled(grouped: GroupedSum, exact: Load, place: dict[DimVar, Dim]) -> Scalar:
    """The one term of the sum of groups, added to nothing."""
    summed = grouped.planes[0].reduce
    dot = map_scalar(grouped.dot, lambda s: exact if isinstance(s, Reduce) and same_scalar(s, summed) else s)
    a, b = (rewrite_dims(part, {**place, grouped.reduce.axes[0][0]: Dim.of(0)}) for part in (dot, grouped.factor))
    return Apply(Fn.FMA, (a, b, zero(DType.F32)))
