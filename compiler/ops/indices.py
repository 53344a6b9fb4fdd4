"""Operands whose elements are indices: what happens to an element outside its range.

    checked   an error names the operand, the value and the bound; for scalars, whose values the host knows
    clamped   the nearest index of the range replaces it; if the range is empty and there are indices, an error says so
    zeroed    zeros are read: index 0 replaces the bad index, and page 0 of states stands for zeros
    skipped   nothing is written at the bad index
    starts    for a list of first indices: the first entry becomes 0, and the last one the bound; other entries are clamped to 0 .. bound,
              and an entry that is smaller than an earlier entry becomes equal to that entry
    capped    for some columns of a table of settings: the last index replaces a larger one, and a negative index means "none"
    owners    for the index of the part to which each element belongs: it is computed from the list of starts, so the operand is not read;
              if there are elements and no parts, an error says so

No index is trusted. `define` records how each index operand is treated. The interpreter treats the operands in this way; a compiled program
does so in one of two places. The legalization checks scalars, and makes a safe copy of the operands that are treated `ahead`; equal copies
are shared, so a step makes one copy for all its layers, and the schedules of the operator need no checks. For other operands, the
operator's own loops bind a safe index, through `clamped_index` and `inside` of index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, Kernel, cast, const, fold, index, less, less_equal, maximum, minimum, select, total

I32, I64 = DType.I32, DType.I64


class BadIndex(CompileError, IndexError):
    """Raised by the interpreter for an index that a program refuses at run time."""


class Treatment(StrEnum):
    """The treatment of an element outside the range. The head of this file explains the members."""

    CHECKED = "checked"
    CLAMPED = "clamped"
    ZEROED = "zeroed"
    SKIPPED = "skipped"
    CAPPED = "capped"
    STARTS = "starts"
    OWNERS = "owners"


@dataclass(frozen=True, slots=True)
class Extent:
    """`factor` times the extent of an axis of an operand, plus `more`. If `axis` is a text, the attribute with this name is the axis."""

    operand: str
    axis: int | str = 0
    factor: int = 1
    more: int = 0

    def __str__(self) -> str:
        factor, more = f" * {self.factor}" if self.factor > 1 else "", f" + {self.more}" if self.more else ""
        return f"{self.operand}.shape[{self.axis}]{factor}{more}"


Bound = Extent | int | str  # a text is the name of the attribute that has the bound
Shapes = Mapping[str, Sequence[Any] | None]


@dataclass(frozen=True, slots=True)
class Index:
    """An operand whose elements are indices in 0 .. `bound` - 1, with these exceptions: for `STARTS`, they are in 0 .. `bound`. For
    `OWNERS`, `bound` is the extent of the list of starts, one more than the number of parts. For `CAPPED`, `bound` has a bound per column.
    With `ahead`, a safe copy is made before the operator runs."""

    treatment: Treatment
    bound: Bound | Mapping[int, Bound]
    ahead: bool = False

    def bound_of(self, shapes: Shapes, attrs: Mapping[str, Any]) -> Any:
        """Return the bound for operands of these shapes: a number, None if the extent is unknown, or, for `CAPPED`, a mapping from columns
        to such bounds."""
        return _value_of(self.bound, shapes, attrs)


def _value_of(bound: Bound | Mapping[int, Bound], shapes: Shapes, attrs: Mapping[str, Any]) -> Any:
    match bound:
        case int():
            return bound
        case str():
            return attrs[bound]
        case Extent(operand, axis, factor, more):
            shape = shapes[operand]
            return None if shape is None else shape[attrs[axis] if isinstance(axis, str) else axis] * factor + more
        case _:
            return {column: _value_of(each, shapes, attrs) for column, each in bound.items()}


Indices = Mapping[str, Index]


def checked(bound: Bound) -> Index:
    return Index(Treatment.CHECKED, bound)


def clamped(bound: Bound, *, ahead: bool = False) -> Index:
    return Index(Treatment.CLAMPED, bound, ahead)


def zeroed(bound: Bound, *, ahead: bool = False) -> Index:
    return Index(Treatment.ZEROED, bound, ahead)


def skipped(bound: Bound) -> Index:
    return Index(Treatment.SKIPPED, bound)


def capped(columns: Mapping[int, Bound]) -> Index:
    return Index(Treatment.CAPPED, columns)


def starts_of(bound: Bound) -> Index:
    return Index(Treatment.STARTS, bound, ahead=True)


def owners(starts: str) -> Index:
    return Index(Treatment.OWNERS, Extent(starts), ahead=True)


def safe_dtype(treatment: Treatment, dtype: DType) -> DType:
    """Return the element type of the safe copy. The type is at least i32 for starts and owners, because an element of their safe copy may
    be larger than every given element."""
    widens = treatment in (Treatment.STARTS, Treatment.OWNERS) and dtype not in (I32, I64)
    return I32 if widens else dtype


# --- in NumPy ----------------------------------------------------------------------------------------------------------


def with_safe_indices(op: str, names: Sequence[str], indices: Indices, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the NumPy function of an operator, so that each index operand is first treated as `indices` says. `names` are the names of the
    operands; `indices` has the treatment and the bound of each operand with indices. The function gets SKIPPED operands unchanged, and must
    itself skip indices outside of the range. The wrapped function raises BadIndex for an index that is refused."""

    def safe(*args: Any, **attrs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        shapes = {name: np.shape(value) for name, value in given.items()}
        for name, declared in indices.items():
            if name in given:
                given[name] = _safe(f"{op}: operand {name}", declared, given, name, declared.bound_of(shapes, attrs))
        return compute(*given.values(), *args[len(given) :], **attrs)

    return safe


def _safe(place: str, declared: Index, given: Mapping[str, Any], name: str, bound: Any) -> Any:
    """Return operand `name` with its indices treated as `declared` says. Raise BadIndex, which names `place`, if a scalar is outside its
    range, or if there are clamped indices or owners, but no index is in range. `given` has all operands by name."""
    value = given[name]
    if declared.treatment is Treatment.CHECKED:
        if not 0 <= value < bound:
            raise BadIndex(f"{place} is {value}, expected 0 <= {name} < {bound}")
        return value
    if declared.treatment is Treatment.SKIPPED:
        return value
    if declared.treatment in (Treatment.CLAMPED, Treatment.OWNERS):
        count = bound - (declared.treatment is Treatment.OWNERS)
        if value.size and not count:
            raise BadIndex(f"{place} has {value.size} indices, and there is nothing to read")
    wide, dtype = value.astype(np.int64), safe_dtype(declared.treatment, DType.from_numpy(value.dtype)).numpy
    match declared.treatment:
        case Treatment.CLAMPED:
            return np.clip(wide, 0, max(0, bound - 1)).astype(dtype)
        case Treatment.CAPPED:
            for column, most in bound.items():
                wide[:, column] = np.minimum(wide[:, column], most - 1)
            return wide.astype(dtype)
        case Treatment.ZEROED:
            return np.where((wide >= 0) & (wide < bound), wide, 0).astype(dtype)
        case Treatment.STARTS:
            ordered = np.maximum.accumulate(np.clip(wide, 0, bound))
            ordered[:1] = 0
            ordered[-1:] = bound
            return ordered.astype(dtype)
        case Treatment.OWNERS:
            assert isinstance(declared.bound, Extent)
            return np.searchsorted(given[declared.bound.operand][1:-1], np.arange(value.size), side="right").astype(dtype)


# --- as loop nests -----------------------------------------------------------------------------------------------------


def safe_nest(treatment: Treatment, given: Buffer, bound: Dim, ordered: Buffer | None) -> tuple[Buffer, Stmt]:
    """Return the safe copy of an index operand, and the nest that fills it. The copy of owners is computed from `ordered`, the safe list of
    starts."""
    k = Kernel()
    values, out = k.arrays(given, Buffer("safe", given.shape, safe_dtype(treatment, given.dtype)))
    with k.nest(given.shape) as at:
        match treatment:
            case Treatment.CLAMPED:
                value = maximum(minimum(cast(values[at], I64), index(bound - 1)), 0)
            case Treatment.ZEROED:
                wide = cast(values[at], I64)
                value = select((wide >= 0) & (wide < index(bound)), wide, 0)
            case Treatment.STARTS:
                value = _start(values, at[0], bound)
            case Treatment.OWNERS:
                assert ordered is not None
                value = _owner(k.array(ordered), at[0])
            case Treatment.CHECKED | Treatment.SKIPPED | Treatment.CAPPED:
                raise AssertionError(f"{treatment} operands have no safe copy")
        out[at] = cast(value, out.dtype)
    return out.buffer, k.body()


def _start(starts: Array, i: Dim, bound: Dim) -> Scalar:
    """Return entry `i` of the safe list: 0 for the first entry, `bound` for the last one, and otherwise the largest of the first `i` + 1
    entries, each clamped to 0 .. `bound`."""
    largest = fold(ReduceFn.MAX, (i + 1,), lambda j: maximum(minimum(cast(starts[j], I64), index(bound)), 0))
    inner = select(less_equal(1, i), largest, 0)
    return select(less(i, starts.shape[0] - 1), inner, index(bound))


def _owner(starts: Array, i: Dim) -> Scalar:
    """Return the index of the part to which element `i` belongs: the number of parts after the first one that begin at or before `i`."""
    later = dim_max(starts.shape[0] - 2, 0)
    return total((later,), lambda j: select(cast(starts[j + 1], I64) <= index(i), const(1, I64), 0))
