"""Products of matrices: register tiles of rows x columns, the contracted axis in order.

Takes a nest whose value contains sums `sum(r) rows(.., r) * columns(r, .., n)`, where `n` is the innermost axis: one of them (linear,
matmul), or several over the same rows (gate and up), with any epilogue around and any decode inside `columns`.

Columns go to the lanes of vectors: NR of them make a panel, which threads claim. Each accumulator adds its products one after another
in the order of `r` with one rounding per step, whatever the number of rows in the tile: so a row has the same bits in every tile, in
every batch, and on every instruction set with a fused multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.codegen.intrinsics.prefetch import AHEAD, LINE_BYTES
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Apply,
    Buffer,
    Cast,
    Fn,
    Load,
    PrimFunc,
    Reduce,
    ReduceFn,
    Scalar,
    Stmt,
    Store,
    Tile,
    dtype_of,
)
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import free_dims, rewrite_dims, walk_scalar
from compiler.schedule.nests import (
    PerfectNest,
    allocated,
    in_bounds,
    loop,
    perfect_nest,
    seq,
    when,
    zero,
)
from compiler.schedule.panels import Panels
from compiler.schedule.pieces import local
from compiler.schedule.same import same_scalar
from compiler.schedule.spot import Spot, TileShape

UNROLLED = 4  # steps of the contracted axis written out: they share what they decode


@dataclass(frozen=True, slots=True)
class Contraction:
    """One sum: `value = sum(r in extent) rows * columns`."""

    reduce: Reduce
    rows: Scalar
    columns: Scalar

    @property
    def axis(self) -> tuple[DimVar, Dim]:
        return self.reduce.axes[0]


@dataclass(frozen=True, slots=True)
class Product:
    """A nest in the form that this rule takes. `row_axis` is None when the columns depend on every other axis too."""

    nest: PerfectNest
    sums: tuple[Contraction, ...]
    row_axis: DimVar | None

    @property
    def column_axis(self) -> DimVar:
        return self.nest.vars[-1]

    def spot(self, shape: TileShape, point: dict[DimVar, Dim], panel: Dim, first: Dim) -> Spot:
        return Spot(self.nest, self.row_axis, shape, point, panel, first)

    def accumulated(self, scalar: Scalar, accs: list[Buffer], place: tuple[Dim, ...]) -> Scalar:
        """In the place of a sum its accumulator."""
        if not isinstance(scalar, Reduce):
            return scalar
        return Load(next(a for s, a in zip(self.sums, accs, strict=True) if same_scalar(scalar, s.reduce)), place)


def match_product(prim: PrimFunc) -> Product | None:
    nest = perfect_nest(prim.body)
    if nest is None or not nest.axes:
        return None
    column = nest.vars[-1]
    if nest.store.indices[-1].var is not column:
        return None
    sums = [_contraction(r, column) for r in distinct(reduces_in(nest.store.value))]
    if not sums or any(s is None for s in sums):
        return None
    found = tuple(s for s in sums if s is not None)
    extent = found[0].axis[1]
    if any(s.axis[1] != extent for s in found):
        return None
    free = [v for v in nest.vars[:-1] if all(v not in free_dims(s.columns) for s in found)]
    return Product(nest, found, free[-1] if free else None)


def reduces_in(scalar: Scalar) -> list[Reduce]:
    """The outermost reductions of an expression, each once."""
    found = dict.fromkeys(s for s in walk_scalar(scalar) if isinstance(s, Reduce))
    inside = {s for r in found for s in walk_scalar(r.value)}
    return [r for r in found if r not in inside]


def distinct(reduces: list[Reduce]) -> list[Reduce]:
    """One of each: a sum that an expression mentions twice is computed once."""
    kept: list[Reduce] = []
    for reduce in reduces:
        if not any(same_scalar(reduce, other) for other in kept):
            kept.append(reduce)
    return kept


def _contraction(reduce: Reduce, column: DimVar) -> Contraction | None:
    value = reduce.value
    if reduce.fn is not ReduceFn.SUM or len(reduce.axes) != 1 or dtype_of(value) is not DType.F32:
        return None
    if not (isinstance(value, Apply) and value.fn is Fn.MUL):
        return None
    for rows, columns in (value.args, value.args[::-1]):
        if column not in free_dims(rows) and column in free_dims(columns) and _plain(rows) and not reduces_in(columns):
            return Contraction(reduce, rows, columns)
    return None


def _plain(rows: Scalar) -> bool:
    """The left operand is read once per panel, so it must be no more than a load."""
    while isinstance(rows, Cast):
        rows = rows.value
    return isinstance(rows, Load)


def schedule_matmul(prim: PrimFunc, tile: TileShape) -> PrimFunc | None:
    product = match_product(prim)
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
        spot = self.product.spot(tile, point, panel, first)
        accs = [local(f"acc{k}", rows, tile.vectors, tile.lanes) for k in range(len(sums))]
        columns = [local(f"w{k}", tile.vectors, tile.lanes) for k in range(len(sums))]

        def clear(m: Dim, v: Dim, lane: Dim) -> Stmt:
            return seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs))

        def step(r: Dim) -> Stmt:
            def at(m: Dim, v: Dim, lane: Dim, scalar: Scalar) -> Scalar:
                return rewrite_dims(scalar, {**spot.at(m, v, lane), **{s.axis[0]: r for s in sums}})

            def fetch(v: Dim, lane: Dim) -> Stmt:
                stores: list[Stmt] = []
                for w, s in zip(columns, sums, strict=True):
                    value = at(Dim.of(0), v, lane, s.columns)
                    put = Store(w, (v, lane), value)
                    stores.append(put if spot.whole or in_bounds(value) else when(spot.inside(v, lane), put))
                return seq(*stores)

            def multiply(m: Dim, v: Dim, lane: Dim) -> Stmt:
                updates: list[Stmt] = []
                for acc, w, s in zip(accs, columns, sums, strict=True):
                    place = (m, v, lane)
                    product = (at(m, v, lane, s.rows), Load(w, (v, lane)), Load(acc, place))
                    updates.append(Store(acc, place, Apply(Fn.FMA, product)))
                return seq(*updates)

            return allocated(columns, seq(spot.vectors(fetch), spot.each(multiply)))

        extent = sums[0].axis[1]
        stride = next(n for n in (UNROLLED, 2, 1) if prove_divisible(extent, n))

        def ask(first: Dim) -> list[Stmt]:
            return [t for s in sums for t in _ask(s, spot, first, stride)] if rows > 1 else []  # one waits for memory, whoever asks

        steps = loop("r", extent // stride, lambda r: seq(*ask(r * stride), *(step(r * stride + u) for u in range(stride))))
        finish = spot.each(lambda m, v, lane: spot.store(m, v, lane, lambda s: self.product.accumulated(s, accs, (m, v, lane))))
        return allocated(accs, seq(spot.each(clear), steps, finish))


def _ask(s: Contraction, spot: Spot, first: Dim, stride: int) -> list[Tile]:
    """For what is read of a packed panel as far ahead as machines do not look."""
    load, columns = s.columns.value if isinstance(s.columns, Cast) else s.columns, spot.shape.columns
    if not isinstance(load, Load) or load.buffer.shape[-1] != Dim.of(columns):
        return []
    corner = {**spot.at(Dim.of(0), Dim.of(0), Dim.of(0)), s.axis[0]: first}
    place = Load(load.buffer, tuple(d.substitute(corner) for d in load.indices))
    num_lines = stride * columns * load.buffer.dtype.num_bytes // LINE_BYTES
    return [Tile("prefetch", (place,), attrs={"far": True, "ahead": AHEAD, "lines": max(num_lines, 1)})]
