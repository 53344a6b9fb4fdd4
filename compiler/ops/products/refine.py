"""Search for the scales and shifts of groups of weights that minimise the squared errors of rounding, each times an importance.

    x           [rows, k] weights
    importance  [rows, k] the factor of each squared error, at least 0
    scale       [rows, k / group]
    shift       [rows, k / group], if the attribute `shifted` is true

A number n stands for n * scale - shift, or for n * scale without shifts. Numbers of 4 bits are 0 to 15 with shifts and -8 to 7 without
them, numbers of 6 bits -32 to 31. If the attribute `kind` is iq4, a number is one of the 16 numbers of an ascending table
(compiler/ir/numbers.py), and is stored as its index.

`refine_groups` rounds weights to the nearest numbers, and computes by least squares the scale and the shift that are best for these
numbers, and the sum of squared errors of each group. If least squares determine no scale or no shift, as in a group whose importances are
all 0, the given scale or shift stays. When weights are rounded, a scale of 0 counts as 1. Repeated calls, each on the results of the call
before, converge to a minimum near the first scale and shift, so a caller compares several starts. `round_groups` returns the numbers,
stored as `dequantize` reads them. `group_errors` returns the sums of squared errors of given scales and shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, const, equal, fma, maximum, minimum, round_half_even, select, total
from compiler.ir.numbers import TABLES, Kind
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import sized_buffer
from compiler.ops.operands import bool_attr, int_attr, tensor_operand
from compiler.ops.products.quantize import MIDDLE, bits_attr
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I32, U8 = DType.F32, DType.I8, DType.I32, DType.U8
SEARCHED = (4, 6)  # bit widths of numbers
SEARCHED_KINDS = (Kind.INT, Kind.IQ4)


def range_of(bits: int, shifted: bool) -> tuple[int, int]:
    """Return the smallest and the largest number of this bit width."""
    return (0, (1 << bits) - 1) if shifted and bits == 4 else (-(1 << bits - 1), (1 << bits - 1) - 1)


def bounds_of(kind: Kind) -> NDArray[np.float32]:
    """Return the middles between adjacent numbers of a table."""
    numbers = TABLES[kind].astype(np.float32)
    return (numbers[1:] + numbers[:-1]) * np.float32(0.5)


def _groups_type(args: tuple[Type, ...], attrs: Attrs, names: tuple[str, ...]) -> TensorType:
    """Return the annotation of a result with one value per group. Raise AnnotationError if operands do not fit together.
    `names` are those of all operands, with the shift last."""
    bits = bits_attr(attrs, SEARCHED)
    if attrs["kind"] not in SEARCHED_KINDS:
        raise AnnotationError(f"attribute kind is {attrs['kind']!r}, expected {' or '.join(SEARCHED_KINDS)}")
    if attrs["kind"] in TABLES and (bits != 4 or attrs["shifted"]):
        raise AnnotationError(f"attribute kind is {attrs['kind']}, expected 4 bits and no shift")
    group, shifted = int_attr(attrs, "group", 2), bool_attr(attrs, "shifted")
    given = [tensor_operand(args, i, name, ndim=2, layout="[rows, ...]") for i, name in enumerate(names[: len(args)])]
    if len(given) != len(names) - (not shifted):
        raise AnnotationError(f"has {len(given)} operands, expected {len(names) - (not shifted)}: {'a' if shifted else 'no'} shift")
    for operand, name in zip(given, names, strict=False):
        if operand.dtype not in (None, F32):
            raise AnnotationError(f"{name} holds {operand.dtype}, expected {F32}")
    x = given[0]
    if x.shape is None:
        return TensorType(None, F32, 2)
    rows, length = x.shape
    if not prove_divisible(length, group):
        raise AnnotationError(f"the last dimension of x is {length}, expected a multiple of the group size, {group}")
    groups = (rows, length // group)
    for operand, name in zip(given[1:], names[1:], strict=False):
        wanted = x.shape if name == "importance" else groups
        if operand.shape is not None and operand.shape != wanted:
            raise AnnotationError(f"{name} is {list(operand.shape)}, expected {list(wanted)}")
    return TensorType(groups, F32)


class _Group:
    """The elements of a group in a loop nest: their values, importances, and nearest numbers. `arrays` are the operands: x, the importance
    if `weighs` is true, the scale and, if there is one, the shift. `at` is the index of the group in the scale."""

    def __init__(self, operands: Operands, arrays: tuple[Array, ...], at: tuple[Dim, ...], *, weighs: bool = True) -> None:
        self.x, *others = arrays
        self.importance = others.pop(0) if weighs else None
        self.at, (self.scale, *shift) = at, (array[at] for array in others)
        self.shift = shift[0] if shift else None
        self.size = operands.attrs["group"]
        self.range = range_of(operands.attrs["bits"], operands.attrs["shifted"])
        self.kind = Kind(operands.attrs["kind"])

    def value(self, r: Dim) -> Scalar:
        return self.x[self.at[0], self.at[1] * self.size + r]

    def factor(self, r: Dim) -> Scalar:
        assert self.importance is not None
        return self.importance[self.at[0], self.at[1] * self.size + r]

    def number(self, r: Dim) -> Scalar:
        """Return the number nearest to an element, as a float."""
        if self.kind in TABLES:
            numbers = TABLES[self.kind].astype(np.float32)
            return self._counted(r, float(numbers[0]), np.diff(numbers))
        least, most = self.range
        return minimum(maximum(round_half_even(self._steps(r)), float(least)), float(most))

    def index(self, r: Dim) -> Scalar:
        """Return the index, in the table, of the number nearest to an element, as a float."""
        return self._counted(r, 0.0, np.ones(len(TABLES[self.kind]) - 1, np.float32))

    def _steps(self, r: Dim) -> Scalar:
        divisor = select(equal(self.scale, 0.0), const(1.0, F32), self.scale)
        return (self.value(r) if self.shift is None else self.value(r) + self.shift) / divisor

    def _counted(self, r: Dim, first: float, gaps: NDArray[np.float32]) -> Scalar:
        """Return `first` plus the gaps of all bounds that an element exceeds. There is a bound, and a gap, between each two adjacent
        numbers of the table."""
        steps, found = self._steps(r), const(first, F32)
        for bound, gap in zip(bounds_of(self.kind), gaps, strict=True):
            found = found + select(steps > float(bound), const(float(gap), F32), 0.0)
        return found

    def error(self, r: Dim) -> Scalar:
        missed = fma(self.number(r), self.scale, -self.value(r))
        return missed if self.shift is None else missed - self.shift

    def sum(self, value: Callable[[Dim], Scalar]) -> Scalar:
        return total((self.size,), lambda r: self.factor(r) * value(r))


# --- refine_groups -----------------------------------------------------------------------------------------------------

_SEARCH = ("x", "importance", "scale", "shift")


def _refine_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: scale, shift if there is one, and error."""
    return TupleType((_groups_type(args, attrs, _SEARCH),) * (3 if attrs["shifted"] else 2))


def _refine_nest(operands: Operands) -> Nest:
    k, out, shifted = Kernel(), operands.out, operands.attrs["shifted"]
    assert isinstance(out, TupleType)
    names = ("better", "moved", "error") if shifted else ("better", "error")
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, names, strict=True))
    given = k.arrays(*(operands.buffer(i) for i in range(3 + shifted)))
    better, *moved, error = k.arrays(*outputs)
    sums = {name: k.workspace(name, *better.shape) for name in ("nn", "nx", "xx", *(("n", "x", "all") if shifted else ()))}

    def terms(group: _Group) -> dict[str, Callable[[Dim], Scalar]]:
        number, value = group.number, group.value
        return {
            "nn": lambda r: number(r) * number(r),
            "nx": lambda r: number(r) * value(r),
            "xx": lambda r: value(r) * value(r),
            "n": number,
            "x": value,
            "all": lambda _: const(1.0, F32),
        }

    for name, of_groups in sums.items():
        with k.nest(better.shape) as at:
            group = _Group(operands, given, at)
            of_groups[at] = group.sum(terms(group)[name])
    with k.nest(better.shape) as at:
        nn, nx = sums["nn"][at], sums["nx"][at]
        if shifted:
            n, x, weight = (sums[name][at] for name in ("n", "x", "all"))
            above, below = weight * nx - n * x, weight * nn - n * n
        else:
            above, below = nx, nn
        better[at] = select(below > 0.0, above / select(below > 0.0, below, 1.0), given[2][at])
    if shifted:
        with k.nest(better.shape) as at:
            weight = sums["all"][at]
            mean = (better[at] * sums["n"][at] - sums["x"][at]) / select(weight > 0.0, weight, 1.0)
            moved[0][at] = select(weight > 0.0, mean, given[3][at])
    with k.nest(better.shape) as at:
        left = sums["xx"][at] - better[at] * sums["nx"][at]
        error[at] = left + moved[0][at] * sums["x"][at] if shifted else left
    return Nest(outputs, k.body())


def _numbers(x: Any, scale: Any, shift: Any, bits: int, group: int, kind: str) -> tuple[Any, Any]:
    """Return the elements of x by group, and the numbers nearest to them under these scales and shifts, as floats."""
    wide = x.reshape(x.shape[0], x.shape[1] // group, group)
    moved = wide if shift is None else wide + shift[..., None]
    steps = moved / np.where(scale == 0, np.float32(1), scale)[..., None]
    if kind in TABLES:
        return wide, TABLES[Kind(kind)].astype(np.float32)[np.searchsorted(bounds_of(Kind(kind)), steps)]
    least, most = range_of(bits, shift is not None)
    return wide, np.clip(np.rint(steps), np.float32(least), np.float32(most))


def _refine_numpy(x: Any, importance: Any, scale: Any, shift: Any = None, *, bits: int, group: int, shifted: bool, kind: str) -> Any:
    wide, n = _numbers(x, scale, shift, bits, group, kind)
    w, one = importance.reshape(wide.shape), np.float32(1)
    nn, nx, xx = (np.sum(w * term, -1, dtype=np.float32) for term in (n * n, n * wide, wide * wide))
    if not shifted:
        better = np.where(nn > 0, nx / np.where(nn > 0, nn, one), scale)
        return better, xx - better * nx
    sn, sx, sw = (np.sum(w * term, -1, dtype=np.float32) for term in (n, wide, np.ones_like(n)))
    below = sw * nn - sn * sn
    better = np.where(below > 0, (sw * nx - sn * sx) / np.where(below > 0, below, one), scale)
    moved = np.where(sw > 0, (better * sn - sx) / np.where(sw > 0, sw, one), shift)
    return better, moved, xx - better * nx + moved * sx


_ATTRIBUTES = {"bits": 4, "group": REQUIRED, "shifted": True, "kind": str(Kind.INT)}
REFINE_GROUPS = define("refine_groups", "x, importance, scale, shift?", _refine_type, _refine_numpy, _refine_nest, _ATTRIBUTES)


# --- group_errors ------------------------------------------------------------------------------------------------------


def _errors_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    return _groups_type(args, attrs, _SEARCH)


def _errors_nest(operands: Operands) -> Nest:
    k, out = Kernel(), operands.out
    assert isinstance(out, TensorType)
    error = k.array(sized_buffer(out, "error"))
    given = k.arrays(*(operands.buffer(i) for i in range(3 + operands.attrs["shifted"])))
    with k.nest(error.shape) as at:
        group = _Group(operands, given, at)
        error[at] = group.sum(lambda r: group.error(r) * group.error(r))
    return Nest((error.buffer,), k.body())


def _errors_numpy(x: Any, importance: Any, scale: Any, shift: Any = None, *, bits: int, group: int, shifted: bool, kind: str) -> Any:
    wide, n = _numbers(x, scale, shift, bits, group, kind)
    missed = n * scale[..., None] - wide
    missed = missed if shift is None else missed - shift[..., None]
    return np.sum(importance.reshape(wide.shape) * (missed * missed), -1, dtype=np.float32)


GROUP_ERRORS = define("group_errors", "x, importance, scale, shift?", _errors_type, _errors_numpy, _errors_nest, _ATTRIBUTES)


# --- round_groups ------------------------------------------------------------------------------------------------------


def _round_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    groups = _groups_type(args, attrs, ("x", "scale", "shift"))
    holds = U8 if attrs["bits"] == 4 else I8
    if groups.shape is None:
        return TensorType(None, holds, 2)
    x = tensor_operand(args, 0, "x")
    assert x.shape is not None
    rows, length = x.shape
    return TensorType((rows, length // 2 if holds is U8 else length), holds)


def _round_nest(operands: Operands) -> Nest:
    k, out, bits, size = Kernel(), operands.out, operands.attrs["bits"], operands.attrs["group"]
    assert isinstance(out, TensorType)
    q = k.array(sized_buffer(out, "q"))
    given = k.arrays(*(operands.buffer(i) for i in range(2 + operands.attrs["shifted"])))
    per_group = size // 2 if bits == 4 else size
    with k.nest((given[1].shape[0], given[1].shape[1], per_group)) as (row, g, j):
        group = _Group(operands, given, (row, g), weighs=False)
        middle = MIDDLE if bits == 4 and not operands.attrs["shifted"] else 0

        def number(r: Dim) -> Scalar:
            return cast(group.index(r), I32) if group.kind in TABLES else cast(group.number(r), I32) + middle

        q[row, g * per_group + j] = cast(number(j * 2) | number(j * 2 + 1) << 4 if bits == 4 else number(j), q.dtype)
    return Nest((q.buffer,), k.body())


def _round_numpy(x: Any, scale: Any, shift: Any = None, *, bits: int, group: int, shifted: bool, kind: str) -> Any:
    _, n = _numbers(x, scale, shift, bits, group, kind)
    if kind in TABLES:
        n = np.searchsorted(TABLES[Kind(kind)], n)
    n = n.reshape(x.shape).astype(np.int32) + (MIDDLE if bits == 4 and not shifted and kind == Kind.INT else 0)
    return (n[:, 0::2] | n[:, 1::2] << 4).astype(np.uint8) if bits == 4 else n.astype(np.int8)


ROUND_GROUPS = define("round_groups", "x, scale, shift?", _round_type, _round_numpy, _round_nest, _ATTRIBUTES)
