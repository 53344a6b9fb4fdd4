"""Products of weights that are widened from 4 bits to 8 for a matrix unit (ops/widened.py).

A block of rows goes through the contracted axis in parts, as blocks.py has it. Each part of a panel is widened once into memory that stays
in the first cache, and all rows of the block multiply it from there: tiles of `shape.rows`, then the powers of two that make up the rest.
Sums of a channel are exact and wait in memory, so no height of a tile can change a bit.

Tiles without a row that needs two planes leave the second one out. Its sums are read for rows that need it only, so the other rows of a
tile do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.blocks import Blocks, Later, Part, configuring
from compiler.backends.cpu.schedule.nests import below, loop, seq, when, zero
from compiler.backends.cpu.schedule.panels import Claim, Height, Panels
from compiler.backends.cpu.schedule.pieces import local
from compiler.backends.cpu.schedule.tile_origin import TileOrigin
from compiler.idioms.nest import allocated
from compiler.idioms.product import GroupedSum, IntegerProduct, integer_product_in
from compiler.ir.dims import Dim, DimVar, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, Fn, Load, PrimFunc, ReduceFn, Scalar, Stmt, Store, Tile
from compiler.ir.visit_loops import rewrite_dims
from compiler.ir.write import Kernel, fold
from compiler.machine.formats import FOUR
from compiler.machine.products import ProductTile

I32 = DType.I32
PLANES = 2  # of the rows
_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0))  # row, vector and lane
BLOCK_ROWS = 512  # widening a panel costs as much as its product with some sixty rows


def _fits(product: IntegerProduct, tile: ProductTile) -> bool:
    return all(_takes(tile, s) for s in product.sums)


def _takes(tile: ProductTile, s: GroupedSum) -> bool:
    """One group as long as the channel, and a second plane that only some rows have."""
    if s.format is not tile.format or s.panels.shape[-1] != Dim.of(tile.shape.columns * FOUR):
        return False
    return tile.widens(s.group, _group(s)) and s.num_groups == Dim.of(1) and s.node.two_planes is not None and not s.node.begins


def _group(s: GroupedSum) -> int:
    """Neighbours along k that share a multiplier."""
    return s.group // s.element.buffers[1].shape[-2].const


def schedule_widened(prim: PrimFunc, tile: ProductTile) -> PrimFunc | None:
    product = integer_product_in(prim)
    if product is None or not _fits(product, tile):
        return None
    return PrimFunc(prim.params, prim.num_outputs, _body(product, tile), {**prim.attrs, "schedule": "widened"})


def _body(product: IntegerProduct, tile: ProductTile) -> Stmt:
    shape, extent, columns = tile.shape, Dim.of(product.sums[0].group), product.nest.axes[-1][1]
    most, block_rows = (1, 1) if product.row_axis is None else (shape.rows, BLOCK_ROWS)
    assert tile.block is not None, tile
    blocks = Blocks(extent, tile.block, tile.depth, tile.format.depth, columns, shape.columns, len(product.sums))
    panels = Panels(product.nest, product.row_axis, shape.columns, most, together=blocks.together, block_rows=BLOCK_ROWS)
    size = (PLANES, blocks.together, block_rows, shape.vectors, shape.lanes)

    wide_size = tile.block * shape.columns

    def memory(grouped: GroupedSum, number: int) -> _Sum:
        exact, num_planes = local(f"exact{number}", *size, dtype=I32), local(f"planes{number}", block_rows, dtype=I32)
        return _Sum(grouped, exact, local(f"wide{number}", wide_size, dtype=DType.I8), num_planes)

    sums = tuple(memory(s, i) for i, s in enumerate(product.sums))
    return panels.blocks(lambda claim, first, end: _Block(product, tile, panels, blocks, sums, claim, first, end).body())


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum, and a thread's own memory for that of a block of rows."""

    grouped: GroupedSum
    exact: Buffer  # by plane, panel, row, vector and lane
    wide: Buffer  # a part of a panel
    num_planes: Buffer  # of a tile, at its first row

    @property
    def multipliers(self) -> Buffer:
        return self.grouped.element.buffers[1]

    @property
    def group(self) -> int:
        return _group(self.grouped)

    def two_planes(self, place: dict[DimVar, Dim]) -> Scalar:
        assert self.grouped.node.two_planes is not None, self.grouped
        return self.at(self.grouped.node.two_planes, place)

    def at(self, scalar: Scalar, place: dict[DimVar, Dim]) -> Scalar:
        """Its one group is all of k."""
        return rewrite_dims(scalar, {**place, self.grouped.axis: Dim.of(0)})


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows first .. end - 1 beside the panels of a claim."""

    product: IntegerProduct
    tile: ProductTile
    panels: Panels
    blocks: Blocks
    sums: tuple[_Sum, ...]
    claim: Claim
    first: Dim
    end: Dim

    def body(self) -> Stmt:
        heights = self.panels.heights(self.first, self.end)
        counted = [h.when_any(h.each(lambda row, h=h: self.counted(row, h.rows))) for h in heights]
        configured = [h.when_any(self.configured(h.rows)) for h in heights]
        finished = loop("m", self.end - self.first, lambda m: self.claim.each(lambda panel: self.finished(panel, m)))
        buffers = [b for s in self.sums for b in (s.exact, s.wide, s.num_planes)]
        return allocated(buffers, seq(*counted, *configured, self.blocks.parts(self.claim, self.through), finished))

    def counted(self, row: Dim, rows: int) -> Stmt:
        """The number of planes of a tile: two where one of its rows needs them."""

        def number(s: _Sum) -> Scalar:
            origin = self.origin(self.claim.panel, row, rows)
            some = fold(ReduceFn.ANY, (rows,), lambda m: s.two_planes(origin.at(m, *_CORNER[:2])))
            return Apply(Fn.ADD, (Cast(some, I32), Const(1, I32)))

        return seq(*(Store(s.num_planes, (row - self.first,), number(s)) for s in self.sums))

    def through(self, panel: Dim, part: Part, later: Later) -> Stmt:
        heights = self.panels.heights(self.first, self.end)
        num_heights = sum((dim_min(h.count, 1) for h in heights), Dim.of(0))

        def tiles(h: Height) -> Stmt:
            configured_again = when(below(1, num_heights), self.configured(h.rows))  # others came between
            return seq(
                configured_again, h.each(lambda row: seq(*(self.planes(s, self.origin(panel, row, h.rows), part) for s in self.sums)))
            )

        return seq(*(self.widened(s, panel, part, later) for s in self.sums), *(h.when_any(tiles(h)) for h in heights))

    def origin(self, panel: Dim, row: Dim, rows: int) -> TileOrigin:
        return TileOrigin(self.product.nest, self.product.row_axis, replace(self.tile.shape, rows=rows), self.claim.point, panel, row)

    def configured(self, rows: int) -> Stmt:
        return seq(*configuring(self.tile, rows))

    def widened(self, s: _Sum, panel: Dim, part: Part, later: Later) -> Tile:
        def places(panel: Dim, begin: Dim) -> tuple[Load, Load]:
            packed = s.grouped.panels
            line, group = begin // s.grouped.format.depth, begin // s.group
            return Load(packed, (panel, line, Dim.of(0))), Load(s.multipliers, (panel, group, Dim.of(0)))

        operands = (Load(s.wide, (Dim.of(0),)), *places(panel, part.begin), *places(later.panel, later.begin))
        assert self.tile.widen is not None, self.tile
        return Tile(replace(self.tile.widen, group=s.group), operands, (part.depth,))

    def planes(self, s: _Sum, origin: TileOrigin, part: Part) -> Stmt:
        """The first part finds nothing in the exact sums."""
        q, place = s.grouped.q, (origin.panel - self.claim.panel, origin.first - self.first)
        row = tuple(d.substitute(origin.at(*_CORNER)) for d in q.indices[:-2])
        stride = q.buffer.shape[-2] * q.buffer.shape[-1]
        op = self.tile.product(origin.shape.rows, fresh=part.is_first)

        def tile(plane: Dim) -> Tile:
            operands = (Load(s.exact, (plane, *place, *_CORNER[1:])), Load(q.buffer, (*row, plane, part.begin)), Load(s.wide, _CORNER[:1]))
            return Tile(op, operands, (part.depth, stride))

        k = Kernel()
        k.add(loop("plane", k.let("planes", Load(s.num_planes, place[1:]), PLANES, lower=1), tile))
        return k.body()

    def finished(self, panel: Dim, m: Dim) -> Stmt:
        line, shape = self.origin(panel, self.first + m, 1), self.tile.shape
        place = (panel - self.claim.panel, m)
        seconds = [local(f"second{i}", shape.vectors, shape.lanes) for i in range(len(self.sums))]

        def second(s: _Sum, added: Buffer) -> Stmt:
            """What the second plane of the row adds: only then it is read."""
            some = line.vectors(lambda *at: Store(added, at, Cast(Load(s.exact, (Dim.of(1), *place, *at)), DType.F32)))
            return when(s.two_planes(line.at(*_CORNER)), some, line.vectors(lambda *at: Store(added, at, zero(DType.F32))))

        def one(v: Dim, lane: Dim) -> Stmt:
            at = (v, lane)

            def result(scalar: Scalar) -> Scalar:
                number = self.product.number_of(scalar)
                if number is None:
                    return scalar
                s, first = self.sums[number], Load(self.sums[number].exact, (Dim.of(0), *place, *at))
                return _scaled(s, first, Load(seconds[number], at), line.at(Dim.of(0), *at))

            return line.store(Dim.of(0), *at, result)

        return allocated(seconds, seq(*map(second, self.sums, seconds), line.vectors(one)))


def _scaled(s: _Sum, first: Load, second: Load, place: dict[DimVar, Dim]) -> Scalar:
    """The one term of the sum of groups, added to nothing."""
    node = s.grouped.node
    exact = node.joined(Cast(first, DType.F32), second)
    return Apply(Fn.FMA, (exact, s.at(node.factor, place), zero(DType.F32)))
