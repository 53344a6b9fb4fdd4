"""Products of bf16 with bf16 by the tile that the machine has for them: the contracted axis goes by in pairs.

Takes what matmul.py takes, where both factors of every sum are elements of bf16 as they lie in memory, and the columns are packed in panels
of pairs, `p[n // C, r // 2, n % C * 2 + r % 2]`. The tile adds in one order whatever its height, so a row has the same bits in every
batch. The work has one of two shapes:

  whole    a tile sums the whole of `r`, for one of the sums after the other; its accumulators stay in registers for the epilogue
  blocks   on matrix units, in parts of `r` (blocks.py); a rest of rows takes the whole of it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.blocks import Blocks, Part, configuring
from compiler.backends.cpu.schedule.nests import loop, seq, zero
from compiler.backends.cpu.schedule.panels import BLOCK_ROWS, Claim, Panels
from compiler.backends.cpu.schedule.pieces import local
from compiler.backends.cpu.schedule.tile_origin import TileOrigin
from compiler.idioms.nest import allocated
from compiler.idioms.product import Product, product_in
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops import Cast, Contraction, Element, Load, PrimFunc, Scalar, Stmt, Store, Tile
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import rewrite_dims
from compiler.machine.products import ProductTile


def pairs_fit(product: Product, tile: ProductTile) -> bool:
    """Whether the tile can take the product, once its columns are packed."""
    return prove_divisible(product.sums[0].extent, tile.depth) and all(_fits(product, s) for s in product.sums)


def _fits(product: Product, s: Contraction) -> bool:
    rows, columns, axis = _element(s.rows), _element(s.columns), s.axes[0][0]
    if rows is None or columns is None or rows.indices[-1].var is not axis:
        return False
    before = rows.indices[:-1]
    if any(axis in d.vars() for d in before):
        return False
    along = [d for d in before if product.row_axis in d.vars()]
    return product.row_axis is None or [d.var for d in along] == [product.row_axis]


def _element(scalar: Scalar) -> Load | None:
    """A number of bf16 as it lies in memory."""
    scalar = scalar.value if isinstance(scalar, Cast) else scalar
    load = scalar.stored[0] if isinstance(scalar, Element) else scalar
    return load if isinstance(load, Load) and load.buffer.dtype is DType.BF16 else None


def _packed(s: Contraction, tile: ProductTile) -> bool:
    element = s.columns.value if isinstance(s.columns, Cast) else s.columns
    if not isinstance(element, Element) or element.format is not tile.format:
        return False
    return element.buffers[0].shape[-1] == Dim.of(tile.shape.columns * tile.format.depth)


def schedule_pairs(prim: PrimFunc, tile: ProductTile) -> PrimFunc | None:
    product = product_in(prim)
    if product is None or not pairs_fit(product, tile) or not all(_packed(s, tile) for s in product.sums):
        return None
    rows = tile.shape.rows if product.row_axis is not None else 1
    panels = Panels(product.nest, product.row_axis, tile.shape.columns, rows)
    if tile.block is None:
        body = panels.walk(_Whole(product, tile).kernel)
    else:
        columns, extent = product.nest.axes[-1][1], product.extent
        blocks = Blocks(extent, tile.block, tile.depth, tile.format.depth, columns, tile.shape.columns, len(product.sums))
        body = _Blocks(product, tile, blocks).walk(panels)
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "pairs"})


@dataclass(frozen=True, slots=True)
class _Whole:
    product: Product
    tile: ProductTile

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        sums = self.product.sums
        origin = TileOrigin.of(self.product, replace(self.tile.shape, rows=rows), point, panel, first)
        accs = [local(f"acc{k}", rows, origin.shape.vectors, origin.shape.lanes) for k in range(len(sums))]
        clear = origin.each(lambda m, v, lane: seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs)))
        whole = Part(Dim.of(0), sums[0].extent, Dim.of(1))
        tiles = [_tile(self.product, self.tile, s, Load(acc, _CORNER[1:]), origin, whole) for s, acc in zip(sums, accs, strict=True)]
        finish = origin.each(lambda m, v, lane: origin.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(clear, *tiles, finish))


@dataclass(frozen=True, slots=True)
class _Blocks:
    product: Product
    tile: ProductTile
    blocks: Blocks

    def walk(self, panels: Panels) -> Stmt:
        def one(point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
            """A rest of rows: in one part, for each panel."""
            return self.rows(Claim(point, panel, Dim.of(1)), first, rows, None)

        return replace(panels, together=self.blocks.together).walk(one, self.rows)

    def rows(self, claim: Claim, first: Dim, rows: int, count: Dim | None) -> Stmt:
        product, sums = self.product, self.product.sums
        most, together = (rows, 1) if count is None else (BLOCK_ROWS, self.blocks.together)
        line = replace(self.tile.shape, rows=1)
        accs = [local(f"acc{k}", together, most, line.vectors, line.lanes) for k in range(len(sums))]

        def tiles(panel: Dim, io: Dim, part: Part) -> list[Tile]:
            origin = TileOrigin.of(product, replace(self.tile.shape, rows=rows), claim.point, panel, first + io * rows)
            place = (panel - claim.panel, io * rows, *_CORNER[2:])
            return [_tile(product, self.tile, s, Load(acc, place), origin, part) for s, acc in zip(sums, accs, strict=True)]

        def finish(m: Dim, panel: Dim) -> Stmt:
            """The epilogue is long: written once, not once per row."""
            origin, zero_dim = TileOrigin.of(product, line, claim.point, panel, first + m), Dim.of(0)

            def result(v: Dim, lane: Dim) -> Stmt:
                return origin.store(zero_dim, v, lane, lambda s: product.accumulated(s, accs, (panel - claim.panel, m, v, lane)))

            return origin.vectors(result)

        configured = configuring(self.tile, rows)
        whole = seq(*tiles(claim.panel, Dim.of(0), self.blocks.whole))
        multiplied = whole if count is None else self.blocks.walk(claim, count, tiles)
        done = loop("m", rows if count is None else count * rows, lambda m: claim.each(lambda panel: finish(m, panel)))
        return allocated(accs, seq(*configured, multiplied, done))


_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0), Dim.of(0))  # of accumulators by panel, row, vector and lane


def _tile(product: Product, tile: ProductTile, s: Contraction, acc: Load, origin: TileOrigin, part: Part) -> Tile:
    """Add a part of the contracted axis to the accumulators; where they wait in memory, the first part finds nothing in them."""
    place = {**origin.at(*_CORNER[1:]), s.axes[0][0]: part.begin}
    left, right = (rewrite_dims(_some(x), place) for x in (s.rows, s.columns))
    assert isinstance(left, Load) and isinstance(right, Load)
    op = tile.product(origin.shape.rows, fresh=part.is_first)
    return Tile(op, (acc, left, right), (part.depth, _stride(product, _some(s.rows))))


def _stride(product: Product, rows: Load) -> Dim:
    """Elements from one row to the next."""
    place = next((i for i, d in enumerate(rows.indices) if d.var is product.row_axis), len(rows.indices) - 1)
    return product_of(rows.buffer.shape[place + 1 :])


def _some(scalar: Scalar) -> Load:
    load = _element(scalar)
    assert load is not None, scalar
    return load
