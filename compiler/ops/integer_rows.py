"""Rows as integers, with a scale per group or per row, for the products of ops/integer.py and ops/widened.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Fn, ReduceFn, Scalar, Stmt
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import sized_buffer
from compiler.ops.nest import apply, cast, const, fill, index_value, load, loops, reduce, seq, store
from compiler.ops.operands import dtype_attr, tensor_operand, wants_float
from compiler.ops.quantize import bits_of, group_of, num_groups
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I16, I32, I64, BOOL = DType.F32, DType.I8, DType.I16, DType.I32, DType.I64, DType.BOOL
LARGEST = {8: 127, 16: 127 * 256 + 127}  # of so many bits: both planes stay within i8
ROUNDING, ROUNDING_BITS = 1.5 * 2.0**23, 0x4B400000  # what is added to f32 loses its fraction, and has the integer in its lowest bits
NEGLIGIBLE = 1e-30  # a group with no greater number becomes zeros

# --- shared ------------------------------------------------------------------------------------------------------------


def widest(x: Buffer, row: Sequence[Dim], first: Dim, count: Dim) -> Scalar:
    """As integers, since a maximum of floats also has to look out for NaN. Here NaN is the largest."""
    bits = reduce(ReduceFn.MAX, (count,), lambda r: apply(Fn.BITS, apply(Fn.ABS, cast(load(x, *row, first + r), F32))))
    return apply(Fn.OF_BITS, bits)


def _inverse(top: Scalar, largest: int) -> Scalar:
    """A group of zeros stays one, and so does one whose inverse would be beyond f32."""
    none = apply(Fn.LT, top, const(NEGLIGIBLE, F32))
    safe = apply(Fn.SELECT, none, const(1.0, F32), top)
    return apply(Fn.SELECT, none, const(0.0, F32), apply(Fn.DIV, const(float(largest), F32), safe))


def integer(steps: Scalar) -> Scalar:
    return apply(Fn.SUB, apply(Fn.BITS, apply(Fn.ADD, steps, const(ROUNDING, F32))), const(ROUNDING_BITS, I32))


def plane(number: Scalar, index: int) -> Scalar:
    upper = apply(Fn.SHR, apply(Fn.ADD, number, const(128, I32)), const(8, I32))
    return upper if index == 0 else apply(Fn.SUB, number, apply(Fn.SHL, upper, const(8, I32)))


def _scales(top: Buffer, scale: Buffer, inverse: Buffer, largest: int, parts: int = 1) -> tuple[Stmt, Stmt]:
    """Of steps that each have so many parts; the inverse is that of a step."""
    scaled = fill(scale, lambda *at: apply(Fn.MUL, load(top, *at), const(float(np.float32(1 / largest)) / parts, F32)))
    return scaled, fill(inverse, lambda *at: _inverse(load(top, *at), largest))


def _steps(x: Any, largest: int) -> tuple[Any, Any]:
    """The last axis in steps of its scale, not yet whole, and the scale."""
    wide = x.astype(np.float32)
    top = np.abs(wide).max(-1, initial=0, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        none = top < np.float32(NEGLIGIBLE)
        inverse = np.where(none, np.float32(0), np.float32(largest) / np.where(none, np.float32(1), top))
        return wide * inverse, top * np.float32(1 / largest)


def _planes(numbers: Any) -> list[Any]:
    upper = (numbers + 128) >> 8
    return [upper, numbers - (upper << 8)]


# --- quantize_rows -----------------------------------------------------------------------------------------------------


def _rows_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """(q [..., planes, k], scale [..., groups], total [..., planes, groups])"""
    x, planes = wants_float(tensor_operand(args, 0, "x"), "x"), _num_planes(attrs)
    holds = dtype_attr(attrs)
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, wants at least 1")
    if x.shape is None:
        rank = x.ndim
        return TupleType(
            (TensorType(None, holds, rank and rank + 1), TensorType(None, F32, rank), TensorType(None, I32, rank and rank + 1))
        )
    *row, length = x.shape
    groups = num_groups(attrs, length)
    return TupleType(
        (
            TensorType((*row, Dim.of(planes), length), holds),
            TensorType((*row, groups), F32),
            TensorType((*row, Dim.of(planes), groups), I32),
        )
    )


def _num_planes(attrs: Attrs) -> int:
    bits, held = bits_of(attrs, LARGEST), dtype_attr(attrs)
    if held not in (I8, I16) or bits < 8 * held.num_bytes:
        raise AnnotationError(f"attribute dtype is {held}, wants i8{' or i16' if bits == 16 else ''} for {bits} bits")
    return bits // (8 * held.num_bytes)


def _rows_nest(operands: Operands) -> Nest:
    """Per group: the largest, the scale, the numbers of each plane, and their sums."""
    x, attrs, out = operands.buffer(0), operands.attrs, operands.out
    assert isinstance(out, TupleType)
    q, scale, total = (sized_buffer(t, name) for t, name in zip(out.fields, ("q", "scale", "total"), strict=True))
    group, largest = group_of(attrs, x.shape[-1]), LARGEST[attrs["bits"]]
    top, inverse = (Buffer(name, scale.shape, F32) for name in ("top", "inverse"))

    def number(*ijk: Dim) -> Scalar:
        *row, g, r = ijk
        return integer(apply(Fn.MUL, cast(load(x, *row, g * group + r), F32), load(inverse, *row, g)))

    def numbers(index: int) -> Stmt:
        def put(*ijk: Dim) -> Stmt:
            *row, g, r = ijk
            value = number(*ijk) if len(planes) == 1 else plane(number(*ijk), index)
            return store(q, (*row, Dim.of(index), g * group + r), cast(value, q.dtype))

        return loops((*scale.shape, group), put)

    def totals(index: int) -> Stmt:
        def put(*at: Dim) -> Stmt:
            *row, g = at
            sums = reduce(ReduceFn.SUM, (group,), lambda r: cast(load(q, *row, Dim.of(index), g * group + r), I32))
            return store(total, (*row, Dim.of(index), g), sums)

        return loops(scale.shape, put)

    planes = range(_num_planes(attrs))
    found = fill(top, lambda *at: widest(x, at[:-1], at[-1] * group, group))
    stages = [found, *_scales(top, scale, inverse, largest), *map(numbers, planes), *map(totals, planes)]
    return Nest((q, scale, total), Allocate(top, Allocate(inverse, seq(*stages))))


def _rows_numpy(x: Any, *, bits: int, group: int, dtype: str) -> Any:
    groups = x.shape[-1] // group if group else 1
    steps, scale = _steps(x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups), LARGEST[bits])
    held, v = DType(dtype), np.rint(steps).astype(np.int32)
    planes = np.stack([v] if bits == 8 * held.num_bytes else _planes(v), -3)
    q = planes.astype(held.numpy).reshape(*x.shape[:-1], planes.shape[-3], x.shape[-1])
    return q, scale[..., 0], planes.sum(-1, dtype=np.int32)


QUANTIZE_ROWS = define("quantize_rows", "x", _rows_type, _rows_numpy, _rows_nest, {"bits": 8, "group": 0, "dtype": "i8"})


# --- row_planes --------------------------------------------------------------------------------------------------------

FINE_FROM = 160  # the square of the largest number by the mean square: then rounding to 127ths has 8 % of the power of 4 bits in groups


def _planes_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """(planes [..., 2, k], scale [..., 1], fine [..., 1])"""
    x = wants_float(tensor_operand(args, 0, "x"), "x")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, wants at least 1")
    if x.shape is None:
        return TupleType((TensorType(None, I8, x.ndim and x.ndim + 1), TensorType(None, F32, x.ndim), TensorType(None, BOOL, x.ndim)))
    *row, length = x.shape
    one = (*row, Dim.of(1))
    return TupleType((TensorType((*row, Dim.of(2), length), I8), TensorType(one, F32), TensorType(one, BOOL)))


def _planes_nest(operands: Operands) -> Nest:
    """Per row: the largest, the scale, the numbers of the first plane, their power, whether there is too little of it, the second plane."""
    x, out = operands.buffer(0), operands.out
    assert isinstance(out, TupleType)
    planes, scale, fine = (sized_buffer(t, name) for t, name in zip(out.fields, ("planes", "scale", "fine"), strict=True))
    length, largest = x.shape[-1], LARGEST[8]
    top, inverse, power = (Buffer(name, scale.shape, held) for name, held in (("top", F32), ("inverse", F32), ("power", I32)))

    def steps(*at: Dim) -> Scalar:
        *row, g, k = at
        return apply(Fn.MUL, cast(load(x, *row, k), F32), load(inverse, *row, g))

    def rest(*at: Dim) -> Scalar:
        """What the first plane has rounded off, in its 256ths. A half of it is one too many for a byte."""
        *row, _, k = at
        left = apply(Fn.SUB, steps(*at), cast(load(planes, *row, 0, k), F32))
        return cast(apply(Fn.MIN, integer(apply(Fn.MUL, left, const(256.0, F32))), const(127, I32)), I8)

    def second(*at: Dim) -> Scalar:
        return apply(Fn.SELECT, load(fine, *at[:-1]), rest(*at), const(0, I8))

    def squares(*at: Dim) -> Scalar:
        def square(r: Dim) -> Scalar:
            number = cast(load(planes, *at[:-1], 0, r), I32)
            return apply(Fn.MUL, number, number)

        return reduce(ReduceFn.SUM, (length,), square)

    def is_fine(*at: Dim) -> Scalar:
        """A row of zeros is not."""
        found, limit = cast(load(power, *at), I64), index_value(ceil_div(length * largest**2, Dim.of(FINE_FROM)))
        return apply(Fn.AND, apply(Fn.LT, const(0, I64), found), apply(Fn.LT, found, limit))

    def put(index: int, value: Callable[..., Scalar]) -> Stmt:
        return loops((*scale.shape, length), lambda *at: store(planes, (*at[:-2], index, at[-1]), value(*at)))

    found, scales = fill(top, lambda *at: widest(x, at[:-1], Dim.of(0), length)), _scales(top, scale, inverse, largest, 256)
    first = put(0, lambda *at: cast(integer(steps(*at)), I8))
    body = seq(found, *scales, first, fill(power, squares), fill(fine, is_fine), put(1, second))
    return Nest((planes, scale, fine), Allocate(top, Allocate(inverse, Allocate(power, body))))


def _planes_numpy(x: Any) -> Any:
    steps, scale = _steps(x, LARGEST[8])
    first = np.rint(steps).astype(np.int32).astype(np.int8).astype(np.int32)
    power, limit = np.square(first).sum(-1, keepdims=True, dtype=np.int64), x.shape[-1] * LARGEST[8] ** 2
    fine = (power > 0) & (power * FINE_FROM < limit)
    rest = np.minimum(np.rint((steps - first.astype(np.float32)) * 256).astype(np.int32), 127)
    return np.stack([first, np.where(fine, rest, 0)], -2).astype(np.int8), scale / np.float32(256), fine


ROW_PLANES = define("row_planes", "x", _planes_type, _planes_numpy, _planes_nest)
