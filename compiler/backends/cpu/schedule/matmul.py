"""Products of matrices: register tiles of rows x columns, the contracted axis in order.

Takes a nest whose value contains sums `sum(r) rows(.., r) * columns(r, .., n)`, where `n` is the innermost axis: one of them (linear,
matmul), or several over the same rows (gate and up), with any epilogue around and any decode inside `columns`.

Columns go to the lanes of vectors: NR of them make a panel, which threads claim. Each accumulator adds its products one after another
in the order of `r` with one rounding per step, whatever the number of rows in the tile: so a row has the same bits in every tile, in
every batch, and on every instruction set with a fused multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.nests import loop, seq, when, zero
from compiler.backends.cpu.schedule.panels import Panels
from compiler.backends.cpu.schedule.pieces import local
from compiler.backends.cpu.schedule.tile_origin import TileOrigin
from compiler.idioms.nest import allocated, in_bounds
from compiler.idioms.product import Product, product_in
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Apply,
    Cast,
    Contraction,
    Fn,
    Load,
    PrimFunc,
    Scalar,
    Stmt,
    Store,
    Tile,
)
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import rewrite_dims
from compiler.machine.products import TileShape
from compiler.machine.target import LINE_BYTES
from compiler.machine.tiles.prefetch import AHEAD, Prefetch

UNROLLED = 4  # steps of the contracted axis written out: they share what they decode


def schedule_matmul(prim: PrimFunc, tile: TileShape) -> PrimFunc | None:
    product = product_in(prim)
    if product is None:
        return None
    schedule = _Schedule(product, tile)
    panels = Panels(product.nest, product.row_axis, tile.columns, schedule.rows, abreast=schedule.abreast)
    body = panels.walk(schedule.kernel, across=schedule.across if schedule.abreast > 1 else None)
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "matmul"})


@dataclass(frozen=True, slots=True)
class _Schedule:
    product: Product
    tile: TileShape

    @property
    def rows(self) -> int:
        """Several sums share the registers, and one row is all there is without a row axis."""
        if self.product.row_axis is None:
            return 1
        return max(1, self.tile.rows // (1 << (len(self.product.sums) - 1).bit_length()))

    @property
    def abreast(self) -> int:
        """Two panels of one sum, as if there were two sums: then additions wait for each other no longer than for memory, and scales beside
        the sums still fit into 16 registers."""
        return 2 if self.rows > 1 and len(self.product.sums) == 1 else 1

    def across(self, point: dict[DimVar, Dim], panel: Dim, row: Dim) -> Stmt:
        wide = replace(self.tile, rows=1, vectors=self.tile.vectors * self.abreast)
        return self._tile(wide, point, panel // self.abreast, row)

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        return self._tile(replace(self.tile, rows=rows), point, panel, first)

    def _tile(self, tile: TileShape, point: dict[DimVar, Dim], panel: Dim, first: Dim) -> Stmt:
        sums, rows = self.product.sums, tile.rows
        origin = TileOrigin.of(self.product, tile, point, panel, first)
        accs = [local(f"acc{k}", rows, tile.vectors, tile.lanes) for k in range(len(sums))]
        columns = [local(f"w{k}", tile.vectors, tile.lanes) for k in range(len(sums))]

        def clear(m: Dim, v: Dim, lane: Dim) -> Stmt:
            return seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs))

        def step(r: Dim) -> Stmt:
            def at(m: Dim, v: Dim, lane: Dim, scalar: Scalar) -> Scalar:
                return rewrite_dims(scalar, {**origin.at(m, v, lane), **{s.axes[0][0]: r for s in sums}})

            def fetch(v: Dim, lane: Dim) -> Stmt:
                stores: list[Stmt] = []
                for w, s in zip(columns, sums, strict=True):
                    value = at(Dim.of(0), v, lane, s.columns)
                    put = Store(w, (v, lane), value)
                    stores.append(put if origin.whole or in_bounds(value) else when(origin.inside(v, lane), put))
                return seq(*stores)

            def multiply(m: Dim, v: Dim, lane: Dim) -> Stmt:
                updates: list[Stmt] = []
                for acc, w, s in zip(accs, columns, sums, strict=True):
                    place = (m, v, lane)
                    product = (at(m, v, lane, s.rows), Load(w, (v, lane)), Load(acc, place))
                    updates.append(Store(acc, place, Apply(Fn.FMA, product)))
                return seq(*updates)

            return allocated(columns, seq(origin.vectors(fetch), origin.each(multiply)))

        extent = sums[0].extent
        stride = next(n for n in (UNROLLED, 2, 1) if prove_divisible(extent, n))

        def prefetched(first: Dim) -> list[Stmt]:
            """A single row waits for memory with or without."""
            return [t for s in sums for t in _prefetch(s, origin, first, stride)] if rows > 1 else []

        steps = loop("r", extent // stride, lambda r: seq(*prefetched(r * stride), *(step(r * stride + u) for u in range(stride))))
        finish = origin.each(lambda m, v, lane: origin.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(origin.each(clear), steps, finish))


def _prefetch(s: Contraction, origin: TileOrigin, first: Dim, stride: int) -> list[Tile]:
    """What is read of a packed panel, further ahead than machines prefetch by themselves."""
    load, columns = s.columns.value if isinstance(s.columns, Cast) else s.columns, origin.shape.columns
    if not isinstance(load, Load) or load.buffer.shape[-1] != Dim.of(columns):
        return []
    corner = {**origin.at(Dim.of(0), Dim.of(0), Dim.of(0)), s.axes[0][0]: first}
    place = Load(load.buffer, tuple(d.substitute(corner) for d in load.indices))
    num_lines = stride * columns * load.buffer.dtype.num_bytes // LINE_BYTES
    return [Tile(Prefetch(far=True, ahead=AHEAD, lines=max(num_lines, 1)), (place,))]
