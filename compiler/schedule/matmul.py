"""Products of matrices: register tiles of rows x columns, the contracted axis in order.

Takes a nest whose value contains sums `sum(r) rows(.., r) * columns(r, .., n)`, where `n` is the innermost axis: one of them (linear,
matmul), or several over the same rows (gate and up), with any epilogue around and any decode inside `columns`.

Columns go to the lanes of vectors: NR of them make a panel, which threads claim. Each accumulator adds its products one after another
in the order of `r` with one rounding per step, whatever the number of rows in the tile: so a row has the same bits in every tile, in
every batch, and on every instruction set with a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    Scope,
    Stmt,
    Store,
    dtype_of,
)
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import free_dims, map_scalar, rewrite_dims
from compiler.schedule.nests import (
    PerfectNest,
    allocated,
    below,
    in_bounds,
    lanes,
    loop,
    perfect_nest,
    seq,
    unroll,
    when,
    zero,
)
from compiler.schedule.panels import Panels
from compiler.schedule.same import same_scalar


@dataclass(frozen=True, slots=True)
class TileShape:
    """`rows` x (`vectors` * `lanes`) accumulators in registers; `rows` is a power of two."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes


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


def match_product(prim: PrimFunc) -> Product | None:
    nest = perfect_nest(prim.body)
    if nest is None or not nest.axes:
        return None
    column = nest.vars[-1]
    if nest.store.indices[-1].var is not column:
        return None
    sums = [_contraction(r, column) for r in _distinct(reduces_in(nest.store.value))]
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
    found: dict[Reduce, None] = {}

    def note(s: Scalar) -> Scalar:
        if isinstance(s, Reduce):
            found[s] = None
        return s

    map_scalar(scalar, note)
    return list(found)


def _distinct(reduces: list[Reduce]) -> list[Reduce]:
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
    panels = Panels(product.nest, product.row_axis, tile.columns, schedule.rows)
    return PrimFunc(prim.params, prim.num_outputs, panels.walk(schedule.kernel), {**prim.attrs, "schedule": "matmul"})


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

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        tile, sums = self.tile, self.product.sums
        accs = [_local(f"acc{k}", rows, tile.vectors, tile.lanes) for k in range(len(sums))]
        columns = [_local(f"w{k}", tile.vectors, tile.lanes) for k in range(len(sums))]
        num_columns = dict(self.product.nest.axes)[self.product.column_axis]
        masked = not prove_divisible(num_columns, tile.columns)

        def column(v: Dim, lane: Dim) -> Dim:
            return panel * tile.columns + v * tile.lanes + lane

        def at(m: Dim, v: Dim, lane: Dim, r: Dim | None = None) -> Callable[[Scalar], Scalar]:
            mapping: dict[DimVar, Dim] = {**point, self.product.column_axis: column(v, lane)}
            if self.product.row_axis is not None:
                mapping[self.product.row_axis] = first + m
            if r is not None:
                mapping |= {s.axis[0]: r for s in sums}
            return lambda scalar: rewrite_dims(scalar, mapping)

        def vectors(body: Callable[[Dim, Dim], Stmt]) -> Stmt:
            return unroll("v", tile.vectors, lambda v: lanes(tile.lanes, lambda lane: body(v, lane)))

        def tiles(body: Callable[[Dim, Dim, Dim], Stmt]) -> Stmt:
            return unroll("m", rows, lambda m: vectors(lambda v, lane: body(m, v, lane)))

        def clear(m: Dim, v: Dim, lane: Dim) -> Stmt:
            return seq(*(Store(acc, (m, v, lane), zero(DType.F32)) for acc in accs))

        def step(r: Dim) -> Stmt:
            def fetch(v: Dim, lane: Dim) -> Stmt:
                stores: list[Stmt] = []
                for w, s in zip(columns, sums, strict=True):
                    value = at(Dim.of(0), v, lane, r)(s.columns)
                    put = Store(w, (v, lane), value)
                    stores.append(put if not masked or in_bounds(value) else when(below(column(v, lane), num_columns), put))
                return seq(*stores)

            def multiply(m: Dim, v: Dim, lane: Dim) -> Stmt:
                updates: list[Stmt] = []
                for acc, w, s in zip(accs, columns, sums, strict=True):
                    place = (m, v, lane)
                    product = (at(m, v, lane, r)(s.rows), Load(w, (v, lane)), Load(acc, place))
                    updates.append(Store(acc, place, Apply(Fn.FMA, product)))
                return seq(*updates)

            return allocated(columns, seq(vectors(fetch), tiles(multiply)))

        def finish(m: Dim, v: Dim, lane: Dim) -> Stmt:
            def result(scalar: Scalar) -> Scalar:
                if not isinstance(scalar, Reduce):
                    return scalar
                acc = next(a for s, a in zip(sums, accs, strict=True) if same_scalar(scalar, s.reduce))
                return Load(acc, (m, v, lane))

            store = self.product.nest.store
            value = map_scalar(store.value, result)
            place = at(m, v, lane)
            mapping = {**point, self.product.column_axis: column(v, lane)}
            if self.product.row_axis is not None:
                mapping[self.product.row_axis] = first + m
            put = Store(store.buffer, tuple(d.substitute(mapping) for d in store.indices), place(value))
            return when(below(column(v, lane), num_columns), put) if masked else put

        extent = sums[0].axis[1]
        stride = next(n for n in (UNROLLED, 2, 1) if prove_divisible(extent, n))
        steps = loop("r", extent // stride, lambda r: seq(*(step(r * stride + u) for u in range(stride))))
        return allocated(accs, seq(tiles(clear), steps, tiles(finish)))


def _local(name: str, *shape: int) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), DType.F32, Scope.LOCAL)
