"""Products of bf16 with bf16 by the tile that the machine has for them: the contracted axis goes by in pairs.

Takes what matmul.py takes, where both factors of every sum are elements of bf16 as they lie in memory, and the columns are packed in panels
of pairs, `p[n // C, r // 2, n % C * 2 + r % 2]`. The tile adds in one order whatever its height, so a row has the same bits in every
batch. The work has one of two shapes:

  whole    a tile sums the whole of `r`, for one of the sums after the other; its accumulators stay in registers for the epilogue
  blocks   on matrix units, which take in operands faster than the second cache gives them: the tiles of a block of rows go through a
           block of `r` together, for which the panel stays in the first cache; their accumulators wait in memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Buffer, Cast, Load, PrimFunc, Scalar, Stmt, Store, Tile
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import rewrite_dims
from compiler.schedule.matmul import Contraction, Product, match_product
from compiler.schedule.nests import allocated, below, loop, product_of, seq, when, zero
from compiler.schedule.panels import BLOCK_ROWS, Panels
from compiler.schedule.pieces import local
from compiler.schedule.spot import Spot, TileShape

PAIR = 2


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
class _Whole:
    product: Product
    tile: PairTile

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        sums = self.product.sums
        spot = self.product.spot(replace(self.tile.shape, rows=rows), point, panel, first)
        accs = [local(f"acc{k}", rows, spot.shape.vectors, spot.shape.lanes) for k in range(len(sums))]
        clear = spot.each(lambda m, v, lane: _clear(accs, m, v, lane))
        tiles = [
            _tile(self.product, self.tile, s, Load(acc, _CORNER), spot, (Dim.of(0), s.axis[1])) for s, acc in zip(sums, accs, strict=True)
        ]
        finish = spot.each(lambda m, v, lane: spot.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(clear, *tiles, finish))


@dataclass(frozen=True, slots=True)
class _Blocks:
    product: Product
    tile: PairTile
    block: int

    def walk(self, panels: Panels) -> Stmt:
        def one(point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
            return self.several(point, panel, first, rows, Dim.of(1))

        return panels.walk(one, self.several)

    def several(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int, count: Dim) -> Stmt:
        product, sums = self.product, self.product.sums
        most = rows if count.is_const else BLOCK_ROWS
        line = replace(self.tile.shape, rows=1)
        accs = [local(f"acc{k}", most, line.vectors, line.lanes) for k in range(len(sums))]

        def each_row(body: Callable[[Spot, Dim, Dim, Dim], Stmt]) -> Stmt:
            """The epilogue is long: written once, not once per row."""

            def at(m: Dim) -> Stmt:
                spot = product.spot(line, point, panel, first + m)
                return spot.vectors(lambda v, lane: body(spot, m, v, lane))

            return loop("m", count * rows, at)

        def part(begin: Dim, depth: Dim) -> Stmt:
            def tiles(io: Dim) -> Stmt:
                spot = product.spot(replace(self.tile.shape, rows=rows), point, panel, first + io * rows)
                places = [Load(acc, (io * rows, Dim.of(0), Dim.of(0))) for acc in accs]
                return seq(*(_tile(product, self.tile, s, place, spot, (begin, depth)) for s, place in zip(sums, places, strict=True)))

            return loop("io", count, tiles)

        clear = each_row(lambda _, m, v, lane: _clear(accs, m, v, lane))
        finish = each_row(lambda spot, m, v, lane: spot.store(Dim.of(0), v, lane, lambda s: product.accumulated(s, accs, (m, v, lane))))
        told = [Tile(self.tile.configure, (), (), {"rows": rows})] if self.tile.configure else []
        return allocated(accs, seq(clear, *told, self.parts(part, count), finish))

    def parts(self, part: Callable[[Dim, Dim], Stmt], count: Dim) -> Stmt:
        """All of the contracted axis, by blocks where several tiles share one."""
        extent = self.product.sums[0].axis[1]
        if count.is_const:
            return part(Dim.of(0), extent)
        left, size = extent % self.block, Dim.of(self.block)
        blocks = loop("rb", extent // self.block, lambda rb: part(rb * self.block, size))
        if prove_divisible(extent, self.block):
            return blocks
        return seq(blocks, when(below(0, left), part(extent - left, left)))


_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0))


def _clear(accs: list[Buffer], m: Dim, v: Dim, lane: Dim) -> Stmt:
    return seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs))


def _tile(product: Product, tile: PairTile, s: Contraction, acc: Load, spot: Spot, part: tuple[Dim, Dim]) -> Tile:
    """Add a part (begin, depth) of the contracted axis to the accumulators."""
    begin, depth = part
    place = {**spot.at(*_CORNER), s.axis[0]: begin}
    left, right = (rewrite_dims(_some(x), place) for x in (s.rows, s.columns))
    assert isinstance(left, Load) and isinstance(right, Load)
    attrs = {"rows": spot.shape.rows, "columns": tile.shape.columns}
    return Tile(tile.intrinsic, (acc, left, right), (depth, _stride(product, _some(s.rows))), attrs)


def _stride(product: Product, rows: Load) -> Dim:
    """Elements from one row to the next."""
    place = next((i for i, d in enumerate(rows.indices) if d.var is product.row_axis), len(rows.indices) - 1)
    return product_of(rows.buffer.shape[place + 1 :])


def _some(scalar: Scalar) -> Load:
    load = _element(scalar)
    assert load is not None, scalar
    return load
