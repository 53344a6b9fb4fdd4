"""Match products of matrices in loop nests, for fusion and schedules.

A product is a nest that stores columns along its innermost axis, and whose value contains contractions. All contractions run over the same
extent: a linear layer has one contraction, gate and up projections have two over the same rows. The operations around the contractions are
the epilogue. The columns may decode quantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from compiler.idioms.nest import PerfectNest, is_rectangular, perfect_nest, product_nest, writes_apart
from compiler.idioms.same import same_scalar
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Cast, Contraction, Element, Fold, Format, GroupedContraction, Load, Reduce, Scalar, dtype_of
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import free_dims, loads, map_scalars, walk_scalar

AnyFold = Reduce | Contraction | GroupedContraction


@dataclass(frozen=True, slots=True)
class GroupedSum:
    """One sum of a product of integers: rows of shape [..., planes, k] times weights in a format. It adds up the exact sums of groups along
    k, each times a factor. A row of 16-bit integers is stored as two planes of 8-bit integers; other rows
    have one plane."""

    node: GroupedContraction
    q: Load  # the load of an element of the first plane
    element: Element

    @property
    def axis(self) -> DimVar:
        """The variable that numbers the groups."""
        return self.node.axes[0][0]

    @property
    def num_groups(self) -> Dim:
        return self.node.axes[0][1]

    @property
    def num_planes(self) -> int:
        return len(self.node.dots)

    @property
    def group(self) -> int:
        """The number of elements of a group along k."""
        return self.node.dots[0].extent.const

    @property
    def first(self) -> Dim:
        """The k at which the group begins."""
        return self.q.indices[-1].substitute({self.node.dots[0].axes[0][0]: 0})

    @property
    def format(self) -> Format:
        return self.element.format

    @property
    def panels(self) -> Buffer:
        return self.element.buffers[0]

    @property
    def matrix(self) -> tuple[Dim, ...]:
        """The indices that select the matrix, if the weight holds several matrices."""
        return _matrix(self.element)


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of the matrix that each row multiplies. `index` reads the number of the matrix from memory. The columns of different sums
    may use different variables for this number; `names` has all of them."""

    names: tuple[DimVar, ...]
    index: Scalar


S = TypeVar("S", Contraction, GroupedSum)


@dataclass(frozen=True, slots=True)
class Product(Generic[S]):
    """A product of matrices. Without a choice, rows along `row_axis` multiply the same columns; `row_axis` is None if the columns depend on
    every axis of rows or, in a product of integers, if no loop variable by itself numbers the rows. With a choice, the row axis and the
    columns' axis are the only axes."""

    nest: PerfectNest
    sums: tuple[S, ...]
    row_axis: DimVar | None
    choice: Choice | None = None

    @property
    def column_axis(self) -> DimVar:
        return self.nest.vars[-1]

    @property
    def num_columns(self) -> Dim:
        return self.nest.axes[-1][1]

    @property
    def extent(self) -> Dim:
        """The number of elements along k that each sum adds up; in a product of integers, the number of groups."""
        return _node(self.sums[0]).axes[0][1]

    def stride(self, rows: Load) -> Dim:
        """Return the number of elements from one row to the next in the buffer that holds the rows. Without a row axis, the number has
        no meaning."""
        place = next((i for i, d in enumerate(rows.indices) if d.var is self.row_axis), len(rows.indices) - 1)
        return product_of(rows.buffer.shape[place + 1 :])

    def number_of(self, scalar: Scalar) -> int | None:
        """Return the index of the sum whose node this scalar is, or None."""
        return next((i for i, s in enumerate(self.sums) if _node(s) is scalar), None)


AnyProduct = Product[Contraction] | Product[GroupedSum]


def _node(s: Contraction | GroupedSum) -> Contraction | GroupedContraction:
    return s.node if isinstance(s, GroupedSum) else s


def product_in(prim: PrimFunc) -> Product[Contraction] | None:
    """Return the product of floats that a function computes. Return None if it computes none, or if its sums have different extents or
    cannot all be computed by tiles."""
    found = _sums_in(prim)
    if found is None:
        return None
    nest, folds = found
    sums = tuple(f for f in folds if isinstance(f, Contraction) and _is_tiled(f, nest.vars[-1]))
    if not sums or len(sums) != len(folds) or any(s.extent != sums[0].extent for s in sums):
        return None
    free = [v for v in nest.vars[:-1] if all(v not in free_dims(s.columns) for s in sums)]
    return _choosing(nest, sums, free[-1] if free else None)


def _choosing(nest: PerfectNest, sums: tuple[S, ...], row_axis: DimVar | None) -> Product[S] | None:
    """Return the product, with its choice if the nest reads integers between its loops. Return None if these integers are not all the same
    integer, if this integer does not depend on the row alone, or if there are other axes than the row axis and the columns' axis."""
    if not nest.lets:
        return Product(nest, sums, row_axis)
    names, (index, *others) = tuple(var for var, _ in nest.lets), [value for _, value in nest.lets]
    if row_axis is None or nest.vars[:-1] != (row_axis,) or free_dims(index) != (row_axis,):
        return None
    if not all(same_scalar(index, other) for other in others):
        return None
    return Product(nest, sums, row_axis, Choice(names, index))


def grouped_product_in(prim: PrimFunc) -> Product[GroupedSum] | None:
    """Return the product of integers that a function computes. Return None if it computes none, or if tiles cannot compute all its sums
    from the same rows and in the same groups."""
    found = _sums_in(prim)
    if found is None:
        return None
    nest, folds = found
    sums = [s for f in folds if isinstance(f, GroupedContraction) and (s := _grouped(f, nest.vars[-1])) is not None]
    same = {(s.num_groups, s.num_planes, s.panels.shape[-1], s.q.indices[:-2]) for s in sums}
    if not sums or len(sums) != len(folds) or len(same) > 1:
        return None
    rows = sums[0].q.indices[:-2]
    return _choosing(nest, tuple(sums), rows[-1].var if rows else None)


def _sums_in(prim: PrimFunc) -> tuple[PerfectNest, list[AnyFold]] | None:
    """Return a nest that writes elements along its innermost axis, with its outermost folds, or None for any other nest. Tiles compute
    elements in any order, so each element must be written once, and no other element of the output may be read."""
    nest = product_nest(prim.body)
    if nest is None or not nest.axes or not is_rectangular(nest.axes) or nest.store.indices[-1].var is not nest.vars[-1]:
        return None
    store = nest.store
    others = [load for load in loads(store.value) if load.indices != store.indices]
    if any(load.buffer is store.buffer for load in (*others, *(load for _, value in nest.lets for load in loads(value)))):
        return None
    folds, variables = outermost_folds(store.value), {*nest.vars, *(var for var, _ in nest.lets)}
    if any(variables & set(extent.vars()) for fold in folds for _, extent in fold.axes):
        return None  # sums of different elements have different lengths
    return (nest, folds) if writes_apart(nest.axes, store.indices) else None


def _grouped(node: GroupedContraction, column: DimVar) -> GroupedSum | None:
    """Match a sum of the kind that operators emit: it reads all planes of one row, and reads weights at the places that their format
    defines. Return None for other sums, such as those of hand-written nests, because tiles cannot read other places."""
    found = [_dot(dot) for dot in node.dots]
    dots = [dot for dot in found if dot is not None]
    if len(dots) != len(found) or len({dot.alike for dot in dots}) > 1:
        return None
    q, element = dots[0].q, dots[0].element
    if [dot.q.indices[-2] for dot in dots] != list(map(Dim.of, range(len(dots)))) or q.buffer.shape[-2] != Dim.of(len(dots)):
        return None
    places = element.format.places(element.buffers, Dim.of(column), element.k, _matrix(element))
    as_stored = [s.indices for s in element.stored if isinstance(s, Load)] == [place.indices for place in places]
    return GroupedSum(node, q, element) if as_stored else None


def _matrix(element: Element) -> tuple[Dim, ...]:
    (stored, *_) = element.stored
    return stored.indices[: -element.format.num_indices] if isinstance(stored, Load) else ()


@dataclass(frozen=True, slots=True)
class _Dot:
    """The sum over one group, for one plane of a row."""

    axis: DimVar
    extent: Dim
    q: Load
    element: Element

    @property
    def alike(self) -> tuple[Any, ...]:
        """The parts that must be equal for all planes of a sum."""
        begin = self.q.indices[-1].substitute({self.axis: 0})
        return self.extent, self.q.buffer, self.q.indices[:-2], begin, self.element.format, self.element.buffers


def _dot(dot: Contraction) -> _Dot | None:
    match dot:
        case Contraction(
            axes=((axis, extent),), rows=Cast(value=Load(indices=(*_, _, _)) as q), columns=Element(stored=(_, *_)) as element
        ):
            return _Dot(axis, extent, q, element) if extent.is_const else None
        case _:
            return None


def _is_tiled(s: Contraction, column: DimVar) -> bool:
    """Whether a tile can compute the sum. The sum must be an f32. Its columns must depend on `column` and contain no fold. Its rows must
    not depend on `column`, and their elements must be loads, possibly cast, because a tile reads each row again for every panel."""
    if dtype_of(s) is not DType.F32 or outermost_folds(s.columns):
        return False
    return column not in free_dims(s.rows) and column in free_dims(s.columns) and is_loaded(s.rows)


def is_loaded(scalar: Scalar) -> bool:
    """Whether the scalar is an element in memory, possibly cast."""
    while isinstance(scalar, Cast):
        scalar = scalar.value
    return isinstance(scalar, Load)


def outermost_folds(scalar: Scalar) -> list[AnyFold]:
    """Return the folds of an expression that are not inside another fold, each once."""
    found = dict.fromkeys(s for s in walk_scalar(scalar) if isinstance(s, Fold))
    inside = {s for fold in found for s in walk_scalar(fold) if s is not fold}
    return [fold for fold in found if fold not in inside]


def with_products(stmt: Stmt) -> Stmt:
    """Replace sums of products by contractions where tiles can compute them. Hand-written nests contain plain sums, and fusion can make a
    sum of products when it moves a product of elements into a sum. A statement that is no perfect nest of serial loops stays as it is, and
    so do sums along several axes."""
    nest = perfect_nest(stmt)
    if nest is None or not nest.axes or all(_contraction(s, nest.vars[-1]) is None for s in walk_scalar(nest.store.value)):
        return stmt
    return map_scalars(stmt, lambda s: _contraction(s, nest.vars[-1]) or s)


def _contraction(scalar: Scalar, column: DimVar) -> Contraction | None:
    """Return the contraction that equals this sum of products, or None if the scalar is no such sum, or no tile can compute it."""
    match scalar:
        case Reduce(fn=ReduceFn.SUM, axes=(_,) as axes, value=Apply(fn=Fn.MUL, args=(a, b))):
            both = Contraction(axes, a, b), Contraction(axes, b, a)
            return next((c for c in both if _is_tiled(c, column)), None)
        case _:
            return None


def without_products(stmt: Stmt) -> Stmt:
    """Replace contractions by plain folds and elements by their decoded values, for nests that no tile computes."""

    def plain(scalar: Scalar) -> Scalar:
        match scalar:
            case Contraction() | GroupedContraction():
                return scalar.fold
            case Element():
                return scalar.decoded
            case _:
                return scalar

    return map_scalars(stmt, plain)
