"""Products of bf16 with bf16 by the tile that the machine has for them: the contracted axis goes by in pairs.

Takes what matmul.py takes, where both factors of every sum are elements of bf16 as they lie in memory, and the columns are packed in panels
of pairs, `p[n // C, r // 2, n % C, r % 2]`. One tile after another sums the whole of `r` for each of the sums; the accumulators then wait
in memory of the thread for the epilogue. The tile adds in one order whatever its height, so a row has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Buffer, Cast, Load, PrimFunc, Scalar, Scope, Stmt, Store, Tile
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import rewrite_dims
from compiler.schedule.matmul import Contraction, Product, match_product
from compiler.schedule.nests import allocated, product_of, seq, zero
from compiler.schedule.panels import Panels
from compiler.schedule.spot import TileShape

PAIR = 2


@dataclass(frozen=True, slots=True)
class PairTile:
    intrinsic: str
    shape: TileShape
    depth: int  # of which the contracted extent must be a multiple


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
    wanted = (column // width, axis // PAIR, column % width, axis % PAIR)
    return load is not None and load.indices[-4:] == wanted and load.buffer.shape[-2:] == (Dim.of(width), Dim.of(PAIR))


def schedule_pairs(prim: PrimFunc, tile: PairTile) -> PrimFunc | None:
    product = match_product(prim)
    if product is None or not pairs_fit(product, tile) or not all(_packed(product, s, tile) for s in product.sums):
        return None
    rows = tile.shape.rows if product.row_axis is not None else 1
    panels = Panels(product.nest, product.row_axis, tile.shape.columns, rows)
    return PrimFunc(prim.params, prim.num_outputs, panels.walk(_Schedule(product, tile).kernel), {**prim.attrs, "schedule": "pairs"})


@dataclass(frozen=True, slots=True)
class _Schedule:
    product: Product
    tile: PairTile

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        shape, sums = replace(self.tile.shape, rows=rows), self.product.sums
        spot = self.product.spot(shape, point, panel, first)
        accs = [
            Buffer(f"acc{k}", (Dim.of(rows), Dim.of(shape.vectors), Dim.of(shape.lanes)), DType.F32, Scope.LOCAL) for k in range(len(sums))
        ]
        clear = spot.each(lambda m, v, lane: seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs)))
        corner = spot.at(Dim.of(0), Dim.of(0), Dim.of(0))
        products = [self.sum(s, acc, corner, rows) for s, acc in zip(sums, accs, strict=True)]
        finish = spot.each(lambda m, v, lane: spot.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(clear, *products, finish))

    def sum(self, s: Contraction, acc: Buffer, corner: dict[DimVar, Dim], rows: int) -> Tile:
        axis, extent = s.axis
        left, right = (rewrite_dims(_some(x), {**corner, axis: Dim.of(0)}) for x in (s.rows, s.columns))
        assert isinstance(left, Load) and isinstance(right, Load)
        attrs = {"rows": rows, "columns": self.tile.shape.columns}
        return Tile(self.tile.intrinsic, (Load(acc, (Dim.of(0),) * 3), left, right), (extent, self.stride(_some(s.rows))), attrs)

    def stride(self, rows: Load) -> Dim:
        """Elements from one row to the next."""
        place = next((i for i, d in enumerate(rows.indices) if d.var is self.product.row_axis), len(rows.indices) - 1)
        return product_of(rows.buffer.shape[place + 1 :])


def _some(scalar: Scalar) -> Load:
    load = _element(scalar)
    assert load is not None, scalar
    return load
