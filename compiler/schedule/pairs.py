"""Products of bf16 with bf16 by the tile that the machine has for them: the contracted axis goes by in pairs.

Takes what matmul.py takes, where both factors of every sum are elements of bf16 as they lie in memory, and the columns are packed in panels
of pairs, `p[n // C, r // 2, n % C * 2 + r % 2]`. The tile adds in one order whatever its height, so a row has the same bits in every
batch. The work has one of two shapes:

  whole    a tile sums the whole of `r`, for one of the sums after the other; its accumulators stay in registers for the epilogue
  blocks   on matrix units, which take in operands faster than the second cache gives them: the tiles of a block of rows go through a
           block of `r` together, for which the panel stays in the first cache; their accumulators wait in memory. Beside many rows
           several panels do so in turn, for which the block's part of the rows stays in the second cache; and each asks for the next
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Cast, Load, PrimFunc, Scalar, Stmt, Store, Tile
from compiler.ir.prove import prove_divisible, prove_le
from compiler.ir.visit_loops import rewrite_dims
from compiler.schedule.matmul import Contraction, Product, match_product
from compiler.schedule.nests import allocated, below, loop, named, product_of, seq, when, zero
from compiler.schedule.panels import BLOCK_ROWS, Claim, Panels
from compiler.schedule.pieces import local
from compiler.schedule.spot import Spot, TileShape

PAIR = 2
LINE_BYTES = 64
MOST_TOGETHER = 8  # panels of a claim: their accumulators are 256 KB beside 256 rows
FEWEST_CLAIMS = 8  # of a block of rows, for threads to share


@dataclass(frozen=True, slots=True)
class PairTile:
    intrinsic: str
    shape: TileShape
    depth: int  # of which the contracted extent must be a multiple
    block: int | None = None  # of the contracted extent, a multiple of `depth`
    configure: str | None = None  # the intrinsic that tells the unit the height of tiles


def pairs_fit(product: Product, tile: PairTile) -> bool:
    """Whether the tile can take the product, once its columns are packed."""
    return prove_divisible(product.sums[0].axis[1], tile.depth) and all(_fits(product, s) for s in product.sums)


def _fits(product: Product, s: Contraction) -> bool:
    rows, columns, axis = _element(s.rows), _element(s.columns), s.axis[0]
    if rows is None or columns is None or rows.indices[-1].var is not axis:
        return False
    before = rows.indices[:-1]
    if any(axis in d.vars() for d in before):
        return False
    along = [d for d in before if product.row_axis in d.vars()]
    return product.row_axis is None or [d.var for d in along] == [product.row_axis]


def _element(scalar: Scalar) -> Load | None:
    """A number of bf16 as it lies in memory."""
    load = scalar.value if isinstance(scalar, Cast) else scalar
    return load if isinstance(load, Load) and load.buffer.dtype is DType.BF16 else None


def _packed(product: Product, s: Contraction, tile: PairTile) -> bool:
    load, axis, width = _element(s.columns), Dim.of(s.axis[0]), tile.shape.columns
    column = Dim.of(product.column_axis)
    wanted = (column // width, axis // PAIR, column % width * PAIR + axis % PAIR)
    return load is not None and load.indices[-3:] == wanted and load.buffer.shape[-1] == Dim.of(width * PAIR)


def schedule_pairs(prim: PrimFunc, tile: PairTile) -> PrimFunc | None:
    product = match_product(prim)
    if product is None or not pairs_fit(product, tile) or not all(_packed(product, s, tile) for s in product.sums):
        return None
    rows = tile.shape.rows if product.row_axis is not None else 1
    panels = Panels(product.nest, product.row_axis, tile.shape.columns, rows)
    body = panels.walk(_Whole(product, tile).kernel) if tile.block is None else _Blocks(product, tile, tile.block).walk(panels)
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "pairs"})


@dataclass(frozen=True, slots=True)
class _Part:
    """Of the contracted axis."""

    begin: Dim
    depth: Dim
    is_last: Dim  # 1 or 0

    @property
    def is_first(self) -> bool:
        return self.begin == Dim.of(0)


@dataclass(frozen=True, slots=True)
class _Later:
    """Where what is read later begins, and how many lines of it each step of a tile asks for."""

    panel: Dim
    begin: Dim
    lines: Dim


@dataclass(frozen=True, slots=True)
class _Whole:
    product: Product
    tile: PairTile

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        sums = self.product.sums
        spot = self.product.spot(replace(self.tile.shape, rows=rows), point, panel, first)
        accs = [local(f"acc{k}", rows, spot.shape.vectors, spot.shape.lanes) for k in range(len(sums))]
        clear = spot.each(lambda m, v, lane: seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs)))
        whole = _Part(Dim.of(0), sums[0].axis[1], Dim.of(1))
        tiles = [_tile(self.product, self.tile, s, Load(acc, _CORNER[1:]), spot, whole) for s, acc in zip(sums, accs, strict=True)]
        finish = spot.each(lambda m, v, lane: spot.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(clear, *tiles, finish))


@dataclass(frozen=True, slots=True)
class _Blocks:
    product: Product
    tile: PairTile
    block: int

    def walk(self, panels: Panels) -> Stmt:
        def one(point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
            return self.several(Claim(point, panel, Dim.of(1)), first, rows, Dim.of(1))

        return replace(panels, together=self.together).walk(one, self.several)

    @property
    def together(self) -> int:
        """Panels for which a block of rows comes once from beyond the second cache; not so many that too few claims are left, or their
        accumulators no longer fit there."""
        columns = self.product.nest.axes[-1][1]
        claims = columns.const // (FEWEST_CLAIMS * self.tile.shape.columns) if columns.is_const else 1
        return max(1, min(MOST_TOGETHER // len(self.product.sums), claims))

    def several(self, claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
        product, sums, single = self.product, self.product.sums, count.is_const
        most, together = (rows, 1) if single else (BLOCK_ROWS, self.together)
        line = replace(self.tile.shape, rows=1)
        accs = [local(f"acc{k}", together, most, line.vectors, line.lanes) for k in range(len(sums))]

        def each_row(body: Callable[[Spot, tuple[Dim, ...], Dim, Dim], Stmt]) -> Stmt:
            """The epilogue is long: written once, not once per row."""

            def at(m: Dim, panel: Dim) -> Stmt:
                spot = product.spot(line, claim.point, panel, first + m)
                return spot.vectors(lambda v, lane: body(spot, (panel - claim.panel, m, v, lane), v, lane))

            return loop("m", count * rows, lambda m: claim.each(lambda panel: at(m, panel)))

        def part(some: _Part) -> Stmt:
            def tiles(panel: Dim, io: Dim, later: _Later | None) -> Stmt:
                spot = product.spot(replace(self.tile.shape, rows=rows), claim.point, panel, first + io * rows)
                place = (panel - claim.panel, io * rows, *_CORNER[2:])
                made = [_tile(product, self.tile, s, Load(acc, place), spot, some) for s, acc in zip(sums, accs, strict=True)]
                return seq(*(made if later is None else [self.asking(tile, later, some, io) for tile in made]))

            def down(panel: Dim, later: _Later | None = None) -> Stmt:
                return loop("io", count, lambda io: tiles(panel, io, later))

            return claim.each(down if single else lambda panel: self.later(claim, panel, some, count, down))

        finish = each_row(lambda spot, place, v, lane: spot.store(Dim.of(0), v, lane, lambda s: product.accumulated(s, accs, place)))
        told = [Tile(self.tile.configure, (), (), {"rows": rows})] if self.tile.configure else []
        return allocated(accs, seq(*told, self.parts(part, single), finish))

    def later(self, claim: Claim, panel: Dim, part: _Part, count: Dim, body: Callable[[Dim, _Later], Stmt]) -> Stmt:
        """What is read after a part of a panel: of the next panel, or the next part of the first one, or of the panel behind the claim."""
        columns, last = self.tile.shape.columns, ceil_div(self.product.nest.axes[-1][1], self.tile.shape.columns) - 1
        # Of a step, whose bf16 are 2 * depth * columns bytes. Where there is no tile, nobody divides by it, but the quotient is computed.
        lines = ceil_div(2 * self.tile.depth * columns // LINE_BYTES, dim_max(count, 1))

        def known(at_end: Dim) -> Stmt:
            first = claim.panel + part.is_last * claim.num_panels
            begin = part.begin + at_end * (1 - part.is_last) * part.depth - at_end * part.is_last * part.begin
            chosen = dim_min(at_end * first + (1 - at_end) * (panel + 1), last)
            return named("later", chosen, last, lambda p: named("share", lines, lines, lambda n: body(panel, _Later(p, begin, n))))

        return named("at_end", 1 - dim_min(claim.panel + claim.num_panels - 1 - panel, 1), 1, known)

    def asking(self, tile: Tile, later: _Later, part: _Part, io: Dim) -> Tile:
        right = tile.operands[2]
        ahead = Load(right.buffer, (*right.indices[:-3], later.panel, later.begin // PAIR, Dim.of(0)))
        first = io * (part.depth // self.tile.depth) * later.lines
        return replace(tile, operands=(*tile.operands, ahead), dims=(*tile.dims, first, later.lines))

    def parts(self, part: Callable[[_Part], Stmt], whole: bool) -> Stmt:
        """All of the contracted axis, by blocks where several tiles share one."""
        extent, size = self.product.sums[0].axis[1], Dim.of(self.block)
        if whole:
            return part(_Part(Dim.of(0), extent, Dim.of(1)))
        left, last = extent % size, ceil_div(extent, size) - 1

        def beginning(number: Dim) -> Stmt:
            return part(_Part(number * size, dim_min(extent, size), 1 - dim_min(last - number, 1)))

        blocks = [beginning(Dim.of(0))]
        if not prove_le(extent, 2 * size - 1):
            blocks.append(loop("rb", dim_max(extent // size - 1, 0), lambda rb: beginning(rb + 1)))
        if not prove_divisible(extent, self.block) and not prove_le(extent, size):
            blocks.append(when(below(0, left * dim_min(extent // size, 1)), part(_Part(extent - left, left, Dim.of(1)))))
        return seq(*blocks)


_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0), Dim.of(0))  # of accumulators by panel, row, vector and lane


def _tile(product: Product, tile: PairTile, s: Contraction, acc: Load, spot: Spot, part: _Part) -> Tile:
    """Add a part of the contracted axis to the accumulators; where they wait in memory, the first part finds nothing in them."""
    place = {**spot.at(*_CORNER[1:]), s.axis[0]: part.begin}
    left, right = (rewrite_dims(_some(x), place) for x in (s.rows, s.columns))
    assert isinstance(left, Load) and isinstance(right, Load)
    attrs = {"rows": spot.shape.rows, "columns": tile.shape.columns, **({"fresh": 1} if tile.block and part.is_first else {})}
    return Tile(tile.intrinsic, (acc, left, right), (part.depth, _stride(product, _some(s.rows))), attrs)


def _stride(product: Product, rows: Load) -> Dim:
    """Elements from one row to the next."""
    place = next((i for i, d in enumerate(rows.indices) if d.var is product.row_axis), len(rows.indices) - 1)
    return product_of(rows.buffer.shape[place + 1 :])


def _some(scalar: Scalar) -> Load:
    load = _element(scalar)
    assert load is not None, scalar
    return load
