"""A product of matrices, as schedules and fusion recognise it: a nest whose value contains sums
`sum(r) rows(.., r) * columns(r, .., n)`, where `n` is the innermost axis.

There may be one sum (linear, matmul) or several over the same rows (gate and up), any epilogue around and any decode inside `columns`.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.idioms.nest import PerfectNest, perfect_nest
from compiler.idioms.same import same_scalar
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Fn, Load, PrimFunc, Reduce, ReduceFn, Scalar, dtype_of
from compiler.ir.visit_loops import free_dims, walk_scalar


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
