"""A product of matrices, as fusion and schedules see it: a nest whose value contains contractions over one extent, along whose columns the
innermost axis runs. There may be one (linear, matmul) or several over the same rows (gate and up), any epilogue around and any decode
inside their columns."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.idioms.nest import PerfectNest, perfect_nest
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Apply,
    Buffer,
    Cast,
    Contraction,
    Fn,
    Fold,
    Load,
    PrimFunc,
    Reduce,
    ReduceFn,
    Scalar,
    Stmt,
    dtype_of,
)
from compiler.ir.visit_loops import free_dims, map_scalars, walk_scalar


@dataclass(frozen=True, slots=True)
class Product:
    """`row_axis` is None when the columns depend on every other axis too."""

    nest: PerfectNest
    sums: tuple[Contraction, ...]
    row_axis: DimVar | None

    @property
    def column_axis(self) -> DimVar:
        return self.nest.vars[-1]

    @property
    def extent(self) -> Dim:
        """Of the contracted axes."""
        return self.sums[0].extent

    def accumulated(self, scalar: Scalar, accs: list[Buffer], place: tuple[Dim, ...]) -> Scalar:
        """In the place of a sum its accumulator."""
        return Load(accs[self.sums.index(scalar)], place) if isinstance(scalar, Contraction) else scalar


def product_in(prim: PrimFunc) -> Product | None:
    nest = perfect_nest(prim.body)
    if nest is None or not nest.axes or nest.store.indices[-1].var is not nest.vars[-1]:
        return None
    folds = outermost_folds(nest.store.value)
    sums = tuple(f for f in folds if isinstance(f, Contraction) and _is_tiled(f, nest.vars[-1]))
    if not sums or len(sums) != len(folds) or any(s.extent != sums[0].extent for s in sums):
        return None
    free = [v for v in nest.vars[:-1] if all(v not in free_dims(s.columns) for s in sums)]
    return Product(nest, sums, free[-1] if free else None)


def _is_tiled(s: Contraction, column: DimVar) -> bool:
    """Whether tiles can take it: a row is read once per panel, so its elements must be no more than loads."""
    if dtype_of(s) is not DType.F32 or outermost_folds(s.columns):
        return False
    return column not in free_dims(s.rows) and column in free_dims(s.columns) and is_loaded(s.rows)


def is_loaded(scalar: Scalar) -> bool:
    """An element as it lies in memory, cast at the most."""
    while isinstance(scalar, Cast):
        scalar = scalar.value
    return isinstance(scalar, Load)


def outermost_folds(scalar: Scalar) -> list[Reduce | Contraction]:
    """The folds of an expression that stand in no other one, each once."""
    found = dict.fromkeys(s for s in walk_scalar(scalar) if isinstance(s, Fold))
    inside = {s for fold in found for s in walk_scalar(fold) if s is not fold}
    return [fold for fold in found if fold not in inside]


def with_products(stmt: Stmt) -> Stmt:
    """The nest with contractions for those sums of products that tiles can take: hand-written nests sum them plainly, and fusion may move a
    product of elements into a sum."""
    nest = perfect_nest(stmt)
    if nest is None or not nest.axes or all(_contraction(s, nest.vars[-1]) is None for s in walk_scalar(nest.store.value)):
        return stmt
    return map_scalars(stmt, lambda s: _contraction(s, nest.vars[-1]) or s)


def _contraction(scalar: Scalar, column: DimVar) -> Contraction | None:
    match scalar:
        case Reduce(fn=ReduceFn.SUM, axes=(_,) as axes, value=Apply(fn=Fn.MUL, args=(a, b))):
            both = Contraction(axes, a, b), Contraction(axes, b, a)
            return next((c for c in both if _is_tiled(c, column)), None)
        case _:
            return None


def without_products(stmt: Stmt) -> Stmt:
    """The statement with plain folds for contractions: no tile takes them."""
    return map_scalars(stmt, lambda s: s.fold if isinstance(s, Contraction) else s)
