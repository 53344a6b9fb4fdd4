"""Quantisation of activation rows to integers, with a scale per group or per row, for the products of integer.py and widened.py.

Elements are measured in steps: `most` steps are as long as `top`, the largest magnitude of the row or group. If there may be outliers,
`_write_tops` computes a smaller `top`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, DimLike, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import (
    Array,
    Kernel,
    bits_of,
    cast,
    const,
    fma,
    index,
    largest,
    minimum,
    of_bits,
    select,
    total,
)
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import sized_buffer
from compiler.ops.operands import bool_attr, dtype_attr, float_attr, tensor_operand, wants_float
from compiler.ops.products.quantize import bits_attr, group_of, num_groups
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I16, I32, I64, BOOL = DType.F32, DType.I8, DType.I16, DType.I32, DType.I64, DType.BOOL
LARGEST = {8: 127, 16: 127 * 256 + 127}  # largest number per bit width; both i8 planes of a 16-bit number are at most 127
ROUNDING, ROUNDING_BITS = 1.5 * 2.0**23, 0x4B400000  # x + ROUNDING has no fraction, and its lowest bits hold the integer nearest to x
# the smallest ratio of a group's largest magnitude to its row's with which all outliers of the row fit in 16 bits
LEAST = float(np.float32(LARGEST[8] / LARGEST[16]))
# The mean magnitude of a row is computed from integers: its largest magnitude becomes FINE. The sum of 2^19 such integers fits in 32 bits.
FINE = 4095
MOST_CAP = 1e6  # a cap times the sum of a row's magnitudes must be a finite f32
NEGLIGIBLE = 1e-30  # a group is quantised to zeros if its largest magnitude is smaller

# --- helpers of both operators -----------------------------------------------------------------------------------------


def _magnitude(x: Array, row: Sequence[Dim], first: DimLike, count: Dim, most: Scalar | None = None) -> Scalar:
    """Return the largest |x| of `count` elements of a row, which begin at `first`. With `most`, return the largest |x| that does not exceed
    `most`, or 0 if all exceed `most`. The bits of the magnitudes are compared as integers, which have the same order as the floats.
    Comparing integers is faster than comparing floats with a test for NaN, and NaN counts as the largest."""

    def bits(r: Dim) -> Scalar:
        found = bits_of(abs(cast(x[*row, first + r], F32)))
        return found if most is None else select(found <= bits_of(most), found, 0)

    return of_bits(largest((count,), bits))


def _inverse(top: Scalar, most: int) -> Scalar:
    """Return `most` / `top`, the number of steps per 1.0, or 0 for a `top` below NEGLIGIBLE, where the quotient could overflow f32."""
    none = top < NEGLIGIBLE
    return select(none, const(0.0, F32), float(most) / select(none, const(1.0, F32), top))


def _rounded(steps: Scalar) -> Scalar:
    """Round to the nearest integer, an i32; ties go to the even integer."""
    return bits_of(steps + ROUNDING) - ROUNDING_BITS


def _plane(number: Scalar, plane: int) -> Scalar:
    """Return plane 0 or plane 1, where number = 256 * plane 0 + plane 1."""
    upper = number + 128 >> 8
    return upper if plane == 0 else number - (upper << 8)


def _write_scales(k: Kernel, top: Array, scale: Array, inverse: Array, most: int, parts: int = 1) -> None:
    """Write the scale and its inverse. `most` steps represent the largest magnitude `top`. `inverse` is the number of steps per 1.0. A step
    is divided into `parts` parts, and `scale` is the size of one part."""
    with k.nest(scale.shape) as at:
        scale[at] = top[at] * (float(np.float32(1 / most)) / parts)
    with k.nest(inverse.shape) as at:
        inverse[at] = _inverse(top[at], most)


def _steps(x: Any, most: int, top: Any = None) -> tuple[Any, Any]:
    """Return x in steps, not yet rounded, and the length of a step (the scale) for each row of the last axis. `most` steps represent `top`,
    which is by default the row's largest magnitude. Where `top` is below NEGLIGIBLE, x counts as 0 steps."""
    wide = x.astype(np.float32)
    top = np.abs(wide).max(-1, initial=0, keepdims=True) if top is None else top
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        none = top < np.float32(NEGLIGIBLE)
        inverse = np.where(none, np.float32(0), np.float32(most) / np.where(none, np.float32(1), top))
        return wide * inverse, top * np.float32(1 / most)


def _planes(numbers: Any) -> list[Any]:
    """Return plane 0 and plane 1 of the numbers, as `_plane` defines them."""
    upper = (numbers + 128) >> 8
    return [upper, numbers - (upper << 8)]


# --- quantize_rows -----------------------------------------------------------------------------------------------------


def _rows_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: q [..., planes, k], scale [..., groups], total [..., planes, groups] and, if the attribute
    `sums` is true, sum [..., groups]."""
    x, planes = wants_float(tensor_operand(args, 0, "x"), "x"), _num_planes(attrs)
    holds = dtype_attr(attrs)
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, expected at least 1")
    if x.shape is None:
        rank = x.ndim
        q, scale = TensorType(None, holds, rank and rank + 1), TensorType(None, F32, rank)
        total = TensorType(None, I32, rank and rank + 1)
    else:
        *row, length = x.shape
        groups = num_groups(attrs, length)
        q, scale = TensorType((*row, Dim.of(planes), length), holds), TensorType((*row, groups), F32)
        total = TensorType((*row, Dim.of(planes), groups), I32)
    return TupleType((q, scale, total, *([scale] if bool_attr(attrs, "sums") else [])))


def _num_planes(attrs: Attrs) -> int:
    """Return the number of planes: 2 for rows of 16 bits in elements of 8 bits, else 1. Raise AnnotationError if the elements are neither
    i8 nor i16, or if rows with a cap do not have 16 bits."""
    bits, held = bits_attr(attrs, LARGEST), dtype_attr(attrs)
    if held not in (I8, I16):
        raise AnnotationError(f"attribute dtype is {held}, expected i8 or i16")
    if _cap(attrs) and bits != 16:
        raise AnnotationError(f"attribute bits is {bits}, expected 16 of rows with a cap")
    return max(1, bits // (8 * held.num_bytes))


def _cap(attrs: Attrs) -> float:
    """Return how many mean magnitudes of its row a number must exceed to be an outlier. 0: no number is an outlier."""
    cap = float_attr(attrs, "cap")
    if not 0 <= cap <= MOST_CAP:
        raise AnnotationError(f"attribute cap is {cap}, expected at least 0 and at most {MOST_CAP:g}")
    return cap


def _rows_nest(operands: Operands) -> Nest:
    """Compute per group the largest magnitude, the scale, the quantised numbers in planes, the sum of each plane and, if `sums` is true,
    the sum of the values that the numbers stand for."""
    k, attrs, out = Kernel(), operands.attrs, operands.out
    assert isinstance(out, TupleType)
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, ("q", "scale", "total", "sum")[: len(out.fields)], strict=True))
    x, q, scale, sums, *values = k.arrays(operands.buffer(0), *outputs)
    group, num_planes = group_of(attrs, x.shape[-1]), _num_planes(attrs)
    top, inverse = k.workspace("top", *scale.shape), k.workspace("inverse", *scale.shape)
    cap = _cap(attrs)
    if cap:
        _write_tops(k, x, top, group, cap)
    else:
        with k.nest(top.shape) as (*row, g):
            top[*row, g] = _magnitude(x, row, g * group, group)
    _write_scales(k, top, scale, inverse, LARGEST[8 if cap else attrs["bits"]])
    for plane in range(num_planes):
        with k.nest((*scale.shape, group)) as (*row, g, r):
            number = _rounded(cast(x[*row, g * group + r], F32) * inverse[*row, g])
            q[*row, plane, g * group + r] = cast(number if num_planes == 1 else _plane(number, plane), q.dtype)
    for plane in range(num_planes):
        with k.nest(scale.shape) as (*row, g):
            sums[*row, plane, g] = _group_sum(q, row, plane, g * group, group)
    for value in values:
        with k.nest(scale.shape) as (*row, g):
            first, *second = (cast(sums[*row, plane, g], F32) for plane in range(num_planes))
            value[*row, g] = scale[*row, g] * (fma(first, const(256.0, F32), second[0]) if second else first)
    return Nest(outputs, k.body())


def _write_tops(k: Kernel, x: Array, top: Array, group: Dim, cap: float) -> None:
    """Write to `top` the largest magnitude of each group without its outliers, but at least LEAST times the largest magnitude of the row,
    so that all outliers fit in 16 bits. The limit of a row, which outliers exceed, is computed from a sum of integers, which has the same
    bits in any order. If a row contains NaN or infinity, its results contain NaN or infinity."""
    *rows, length = x.shape
    row_top, inverse, limit = (k.workspace(name, *rows) for name in ("row_top", "row_inverse", "limit"))
    size = k.workspace("size", *rows, dtype=I32)
    with k.nest(rows) as row:
        row_top[row] = _magnitude(x, row, 0, length)
    with k.nest(rows) as row:
        inverse[row] = _inverse(row_top[row], FINE)
    with k.nest(rows) as row:
        size[row] = total((length,), lambda r: _rounded(abs(cast(x[*row, r], F32)) * inverse[row]))
    with k.nest(rows) as row:
        limit[row] = row_top[row] * (cast(size[row], F32) * float(np.float32(cap / FINE)) / cast(index(length), F32))
    with k.nest(top.shape) as (*row, g):
        found = _magnitude(x, row, g * group, group, limit[row])
        least = row_top[row] * LEAST
        top[*row, g] = select(least < found, found, least)


def _group_sum(q: Array, row: Sequence[Dim], plane: int, first: Dim, count: Dim) -> Scalar:
    return total((count,), lambda r: cast(q[*row, plane, first + r], I32))


def _rows_numpy(x: Any, *, bits: int, group: int, dtype: str, sums: bool, cap: float) -> Any:
    """Compute with NumPy what `_rows_nest` writes: the quantised numbers in planes, the scale of each group, the sum of each plane of each
    group and, with `sums`, the sum of each group's numbers times its scale. With a `cap`, the steps are those of 8 bits, and outliers may
    need 16 bits (see the comment on QUANTIZE_ROWS)."""
    length = x.shape[-1]
    grouped = x.reshape(*x.shape[:-1], length // group if group else 1, group or length)
    steps, scale = _steps(grouped, LARGEST[8], _tops(x, grouped, cap)) if cap else _steps(grouped, LARGEST[bits])
    held = DType(dtype)
    with np.errstate(invalid="ignore"):
        numbers = np.rint(steps).astype(np.int32)
    planes = np.stack([numbers] if bits <= 8 * held.num_bytes else _planes(numbers), -3)
    q = planes.astype(held.numpy).reshape(*x.shape[:-1], planes.shape[-3], x.shape[-1])
    found = q, scale[..., 0], planes.sum(-1, dtype=np.int32)
    return (*found, found[1] * numbers.sum(-1, dtype=np.int32).astype(np.float32)) if sums else found


def _tops(x: Any, grouped: Any, cap: float) -> Any:
    steps, _ = _steps(x, FINE)
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(np.rint(steps).astype(np.int64)).sum(-1, keepdims=True).astype(np.float32)
        row_top = np.abs(x.astype(np.float32)).max(-1, initial=0, keepdims=True)
        limit = row_top * (size * np.float32(cap / FINE) / np.float32(x.shape[-1]))
        magnitudes, least = np.abs(grouped.astype(np.float32)), (row_top * np.float32(LEAST))[..., None]
        found = np.where(magnitudes <= limit[..., None], magnitudes, 0).max(-1, initial=0, keepdims=True)
        return np.where(least < found, found, least)


# If `cap` is not 0, numbers that exceed `cap` times the mean magnitude of their row are outliers. The step of a group is that of 8 bits for
# the group without its outliers, or larger (`_write_tops`). So only outliers may need 16 bits; the upper plane of other numbers is zero.
QUANTIZE_ROWS = define(
    "quantize_rows",
    "x",
    _rows_type,
    _rows_numpy,
    _rows_nest,
    {"bits": 8, "group": 0, "dtype": "i8", "sums": False, "cap": 0.0},
)


# --- row_planes --------------------------------------------------------------------------------------------------------

# A row needs two planes (16 bits) if the square of its largest number exceeds TWO_PLANES_FROM times the mean square of the row. At that
# ratio, rounding to 127ths of the largest number adds noise with 8 % of the power of the noise that grouped 4-bit weights cause.
TWO_PLANES_FROM = 160


def _planes_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: planes [..., 2, k], scale [..., 1], two_planes [..., 1] (bool)."""
    x = wants_float(tensor_operand(args, 0, "x"), "x")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, expected at least 1")
    if x.shape is None:
        return TupleType((TensorType(None, I8, x.ndim and x.ndim + 1), TensorType(None, F32, x.ndim), TensorType(None, BOOL, x.ndim)))
    *row, length = x.shape
    one = (*row, Dim.of(1))
    return TupleType((TensorType((*row, Dim.of(2), length), I8), TensorType(one, F32), TensorType(one, BOOL)))


def _planes_nest(operands: Operands) -> Nest:
    """Compute for each row its largest magnitude, its scale, the first plane, the sum of squares of that plane (`power`), whether the row
    needs a second plane, and the second plane."""
    kernel, out = Kernel(), operands.out
    assert isinstance(out, TupleType)
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, ("planes", "scale", "two_planes"), strict=True))
    x, planes, scale, two_planes = kernel.arrays(operands.buffer(0), *outputs)
    length, most = x.shape[-1], LARGEST[8]
    top, inverse = kernel.workspace("top", *scale.shape), kernel.workspace("inverse", *scale.shape)
    power = kernel.workspace("power", *scale.shape, dtype=I32)

    def square(row: list[Dim], k: Dim) -> Scalar:
        number = cast(planes[*row, 0, k], I32)
        return number * number

    with kernel.nest(top.shape) as (*row, g):
        top[*row, g] = _magnitude(x, row, 0, length)
    _write_scales(kernel, top, scale, inverse, most, parts=256)
    with kernel.nest((*scale.shape, length)) as (*row, g, k):
        planes[*row, 0, k] = cast(_rounded(cast(x[*row, k], F32) * inverse[*row, g]), I8)
    with kernel.nest(power.shape) as (*row, g):
        power[*row, g] = total((length,), lambda r: square(row, r))
    with kernel.nest(two_planes.shape) as at:
        found = cast(power[at], I64)
        two_planes[at] = (found > 0) & (found < ceil_div(length * most**2, Dim.of(TWO_PLANES_FROM)))  # a row of zeros needs one plane
    with kernel.nest((*scale.shape, length)) as (*row, g, k):
        rest = cast(x[*row, k], F32) * inverse[*row, g] - cast(planes[*row, 0, k], F32)  # rounding error of the first plane
        parts = minimum(_rounded(rest * 256.0), 127)  # in 256ths of a step; half a step is 128 of them, which does not fit into i8
        planes[*row, 1, k] = select(two_planes[*row, g], cast(parts, I8), 0)
    return Nest(outputs, kernel.body())


def _planes_numpy(x: Any) -> Any:
    steps, scale = _steps(x, LARGEST[8])
    first = np.rint(steps).astype(np.int32).astype(np.int8).astype(np.int32)
    power, limit = np.square(first).sum(-1, keepdims=True, dtype=np.int64), x.shape[-1] * LARGEST[8] ** 2
    two_planes = (power > 0) & (power * TWO_PLANES_FROM < limit)
    rest = np.minimum(np.rint((steps - first.astype(np.float32)) * 256).astype(np.int32), 127)
    return np.stack([first, np.where(two_planes, rest, 0)], -2).astype(np.int8), scale / np.float32(256), two_planes


ROW_PLANES = define("row_planes", "x", _planes_type, _planes_numpy, _planes_nest)
