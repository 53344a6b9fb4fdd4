"""What an integer product is: a nest whose value contains `sum(g) dots * factor` as ops/integer.py writes it, where a dot is the sum of one
group of k, or two of them (planes of the rows); any epilogue around, and several such sums over the same rows (gate and up). Weights may
be widened, as ops/widened.py has them, and the second plane may count in some rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from compiler.idioms.nest import PerfectNest, perfect_nest
from compiler.idioms.product import outermost_folds
from compiler.idioms.same import same_scalar
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, Fn, Load, PrimFunc, Reduce, ReduceFn, Scalar, dtype_of
from compiler.ir.visit_loops import loads, walk_scalar
from compiler.machine.panels import FOUR
from compiler.ops.integer import panel_element
from compiler.ops.widened import BITS as WIDENED_BITS
from compiler.ops.widened import widened_element


@dataclass(frozen=True, slots=True)
class Plane:
    """`sum(r in group) q[.., row, plane, k] * panels[k, column]`, in i32, and what is added to it."""

    reduce: Reduce
    q: Load
    panels: Buffer
    bits: int
    multipliers: Buffer | None = None  # by which weights of 4 bits are widened

    @property
    def rows(self) -> DType:
        return self.q.buffer.dtype

    @property
    def group(self) -> int:
        return self.reduce.axes[0][1].const

    @property
    def first(self) -> Dim:
        """k where the group begins."""
        return self.q.indices[-1].substitute({self.reduce.axes[0][0]: 0})


@dataclass(frozen=True, slots=True)
class GroupedSum:
    """`sum(g) dot * factor`."""

    reduce: Reduce
    dot: Scalar  # of all planes
    factor: Scalar
    planes: tuple[Plane, ...]
    two_planes: Load | None = None  # whether the second plane counts in a row; None: it does in all

    @property
    def num_groups(self) -> Dim:
        return self.reduce.axes[0][1]

    @property
    def bits(self) -> int:
        return self.planes[0].bits


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    nest: PerfectNest
    sums: tuple[GroupedSum, ...]
    row_axis: DimVar | None

    @property
    def column_axis(self) -> DimVar:
        return self.nest.vars[-1]

    @property
    def columns(self) -> int:
        """Of a panel, as the weights are laid out."""
        return self.sums[0].planes[0].panels.shape[-1].const // FOUR


def match_integer(prim: PrimFunc) -> IntegerProduct | None:
    nest = perfect_nest(prim.body)
    if nest is None or not nest.axes or nest.store.indices[-1].var is not nest.vars[-1]:
        return None
    found = [_grouped(r, nest) for r in distinct(reduces_in(nest.store.value))]
    sums = tuple(s for s in found if s is not None)
    if not sums or len(sums) != len(found) or len({(s.num_groups, len(s.planes), s.planes[0].panels.shape[-1]) for s in sums}) > 1:
        return None
    rows = sums[0].planes[0].q.indices[:-2]
    if any(list(p.q.indices[:-2]) != list(rows) for s in sums for p in s.planes):
        return None
    return IntegerProduct(nest, sums, rows[-1].var if rows else None)


def reduces_in(scalar: Scalar) -> list[Reduce]:
    return [f for f in outermost_folds(scalar) if isinstance(f, Reduce)]


def distinct(reduces: list[Reduce]) -> list[Reduce]:
    """One of each: a sum that an expression mentions twice is computed once."""
    kept: list[Reduce] = []
    for reduce in reduces:
        if not any(same_scalar(reduce, other) for other in kept):
            kept.append(reduce)
    return kept


def _grouped(reduce: Reduce, nest: PerfectNest) -> GroupedSum | None:
    value = reduce.value
    if reduce.fn is not ReduceFn.SUM or len(reduce.axes) != 1 or not (isinstance(value, Apply) and value.fn is Fn.MUL):
        return None
    found = [_plane(r, nest) for r in reduces_in(value)]
    planes = tuple(p for p in found if p is not None)
    if not planes or len(planes) != len(found):
        return None
    first = planes[0]
    whose = (first.q.buffer, first.panels, first.multipliers, first.group, first.first)
    alike = all((p.q.buffer, p.panels, p.multipliers, p.group, p.first) == whose for p in planes)
    in_order = [p.q.indices[-2] for p in planes] == [Dim.of(i) for i in range(len(planes))]
    if not alike or not in_order or first.q.buffer.shape[-2] != Dim.of(len(planes)):
        return None
    dot, factor = value.args
    two_planes = next((s.args[0] for s in walk_scalar(dot) if is_second(s, planes)), None)
    if reduces_in(factor) or not (two_planes is None or (isinstance(two_planes, Load) and two_planes.indices[:-1] == first.q.indices[:-2])):
        return None
    return GroupedSum(reduce, dot, factor, planes, two_planes)


def is_second(scalar: Scalar, planes: tuple[Plane, ...]) -> TypeGuard[Apply]:
    """The sum of the second plane, or nothing."""
    if not (isinstance(scalar, Apply) and scalar.fn is Fn.SELECT and len(planes) == 2):
        return False
    _, some, none = scalar.args
    return isinstance(some, Cast) and some.value is planes[1].reduce and isinstance(none, Const) and none.value == 0


def _plane(reduce: Reduce, nest: PerfectNest) -> Plane | None:
    value = reduce.value
    if reduce.fn is not ReduceFn.SUM or len(reduce.axes) != 1 or dtype_of(value) is not DType.I32 or not reduce.axes[0][1].is_const:
        return None
    if not (isinstance(value, Apply) and value.fn is Fn.MUL and isinstance(value.args[0], Cast) and isinstance(value.args[0].value, Load)):
        return None
    q, buffers = value.args[0].value, {load.buffer for load in loads(value.args[1])}
    panels, multipliers = ([b for b in buffers if b.dtype is dtype] for dtype in (DType.U8, DType.I8))
    if (
        len(panels) != 1
        or len(buffers) > 2
        or q.buffer.dtype not in (DType.I8, DType.I16)
        or len(q.indices) < 2
        or not set(q.indices[:-2]) <= {Dim.of(v) for v in nest.vars[:-1]}
    ):
        return None
    (panel,), column, k = panels, Dim.of(nest.vars[-1]), q.indices[-1]
    for widening in multipliers:
        group = reduce.axes[0][1] // widening.shape[-2]
        fits = group.is_const and same_scalar(value.args[1], widened_element(panel, widening, column, k, group.const))
        return Plane(reduce, q, panel, WIDENED_BITS, widening) if fits else None
    for bits in (8, 4):
        if same_scalar(value.args[1], panel_element(panel, bits, column, k, q.buffer.dtype is DType.I16)):
            return Plane(reduce, q, panel, bits)
    return None
