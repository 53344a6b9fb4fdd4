"""Integers that stand for floats: x = (q - zero) * scale, with a scale per group of `group` neighbours along the last axis.

    q       i8 [..., k], or u8 [..., k / 2] with two 4-bit numbers each: the lower half is the even one
    scale   [..., k / group]         one group as long as the axis is a scale per channel
    zero    like scale, in q's numbers; without it the numbers are symmetric around 0 (4 bits: around 8)

Dequantising is an ordinary loop nest, which fusion puts into the product that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Fn, ReduceFn, Scalar, Stmt
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import output, sized_buffer
from compiler.ops.nest import apply, cast, const, fill, index_value, load, loops, reduce, seq, store
from compiler.ops.operands import agree, bool_attr, dtype_attr, int_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I32, U8 = DType.F32, DType.I8, DType.I32, DType.U8
MIDDLE = 8  # what a symmetric 4-bit number counts from
MOST = {8: 127, 4: 7}  # the largest symmetric number


def bits_of(attrs: Attrs, known: Mapping[int, int]) -> int:
    bits = int_attr(attrs, "bits")
    if bits not in known:
        raise AnnotationError(f"attribute bits is {bits}, wants {' or '.join(map(str, known))}")
    return bits


def group_of(attrs: Attrs, length: Dim) -> Dim:
    """The attribute, where 0 stands for the whole axis."""
    group = int_attr(attrs, "group", 0)
    if group and not prove_divisible(length, group):
        raise AnnotationError(f"the last dimension is {length}, wants a multiple of the group, {group}")
    return Dim.of(group) if group else length


def num_groups(attrs: Attrs, length: Dim) -> Dim:
    return length // group_of(attrs, length) if attrs["group"] else Dim.of(1)


# --- dequantize --------------------------------------------------------------------------------------------------------


def _dequantize_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    q, dtype, bits = tensor_operand(args, 0, "q"), dtype_attr(attrs), bits_of(attrs, MOST)
    holds = I8 if bits == 8 else U8
    if q.dtype not in (None, holds):
        raise AnnotationError(f"q holds {q.dtype}, wants {holds} for {bits} bits")
    if not dtype.is_float:
        raise AnnotationError(f"attribute dtype is {dtype}, wants a float")
    if q.ndim == 0:
        raise AnnotationError("q has rank 0, wants at least 1")
    if q.shape is None:
        return TensorType(None, dtype, q.ndim)
    shape = (*q.shape[:-1], q.shape[-1] * (8 // bits))
    groups = (*shape[:-1], num_groups(attrs, shape[-1]))
    for i, name in enumerate(("scale", "zero")[: len(args) - 1], 1):
        given = tensor_operand(args, i, name, ndim=len(shape), layout="[..., groups]")
        for d, (w, g) in enumerate(zip(groups, given.shape or groups, strict=True)):
            agree(w, g, f"dimension {d} of {name}")
    wants_float(tensor_operand(args, 1, "scale"), "scale")
    return TensorType(shape, dtype)


def _dequantize_nest(operands: Operands) -> Nest:
    out, q, scale = output(operands), operands.buffer(0), operands.buffer(1)
    zero = operands.buffer(2) if operands.has(2) else None
    attrs, length = operands.attrs, out.shape[-1]

    def number(*ijk: Dim) -> Scalar:
        *row, k = ijk
        if attrs["bits"] == 8:
            return cast(load(q, *row, k), F32)
        pair = cast(load(q, *row, k // 2), I32)
        half = apply(Fn.AND, apply(Fn.SHR, pair, cast(index_value(k % 2 * 4), I32)), const(15, I32))
        return cast(half, F32)

    def value(*ijk: Dim) -> Scalar:
        at = (*ijk[:-1], ijk[-1] // group_of(attrs, length) if attrs["group"] else Dim.of(0))
        origin: Scalar | None = None if zero is None else cast(load(zero, *at), F32)
        if origin is None and attrs["bits"] == 4:
            origin = const(MIDDLE, F32)
        shifted = number(*ijk) if origin is None else apply(Fn.SUB, number(*ijk), origin)
        return cast(apply(Fn.MUL, shifted, cast(load(scale, *at), F32)), out.dtype)

    groups = (*out.shape[:-1], num_groups(attrs, length))
    return Nest((out,), fill(out, value), checks=unproved(operands, dict.fromkeys(range(1, len(operands.places)), groups)))


def _spread(x: Any, length: int) -> Any:
    return np.repeat(x.astype(np.float32), length // max(1, x.shape[-1]), -1)


def _dequantize_numpy(q: Any, scale: Any, zero: Any = None, *, bits: int, group: int, dtype: str) -> Any:
    if bits == 4:
        q = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1)
    wide = q.astype(np.float32)
    length = wide.shape[-1]
    if zero is not None:
        wide = wide - _spread(zero, length)
    elif bits == 4:
        wide = wide - np.float32(MIDDLE)
    return (wide * _spread(scale, length)).astype(DType(dtype).numpy)


DEQUANTIZE = define(
    "dequantize", "q, scale, zero?", _dequantize_type, _dequantize_numpy, _dequantize_nest, {"bits": 8, "group": 0, "dtype": "f32"}
)


# --- quantize ----------------------------------------------------------------------------------------------------------


def _levels(bits: int) -> tuple[int, int]:
    """The smallest and the largest number that `bits` hold."""
    return (-128, 127) if bits == 8 else (0, 15)


def _quantize_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """(q, scale) where symmetric, else (q, scale, zero)."""
    x, dtype, bits = wants_float(tensor_operand(args, 0, "x"), "x"), dtype_attr(attrs), bits_of(attrs, MOST)
    holds = I8 if bits == 8 else U8
    if not dtype.is_float:
        raise AnnotationError(f"attribute dtype is {dtype}, wants a float")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, wants at least 1")
    if x.shape is None:
        kinds = [TensorType(None, d, x.ndim) for d in (holds, dtype, holds)]
    else:
        *row, length = x.shape
        groups = (*row, num_groups(attrs, length))
        if bits == 4 and not prove_divisible(length, 2):
            raise AnnotationError(f"the last dimension is {length}, wants an even one for 4 bits")
        if bits == 4 and not prove_divisible(group_of(attrs, length), 2):
            raise AnnotationError(f"attribute group is {attrs['group']}, wants an even one for 4 bits")
        kinds = [TensorType((*row, length * bits // 8), holds), TensorType(groups, dtype), TensorType(groups, holds)]
    return TupleType(tuple(kinds[:2] if bool_attr(attrs, "symmetric") else kinds))


def _quantize_nest(operands: Operands) -> Nest:
    """The range of each group, its scale as it will be stored, its zero, then the numbers."""
    x, attrs, out = operands.buffer(0), operands.attrs, operands.out
    assert isinstance(out, TupleType)
    bits = attrs["bits"]
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, ("q", "scale", "zero"), strict=False))
    q, scale = outputs[:2]
    zero = None if attrs["symmetric"] else outputs[2]
    group = group_of(attrs, x.shape[-1])
    low, high = (Buffer(name, scale.shape, F32) for name in ("low", "high"))
    smallest, largest = (const(n, F32) for n in _levels(bits))

    def extreme(fn: ReduceFn, bound: Fn) -> Any:
        def value(*ijk: Dim) -> Scalar:
            found = reduce(fn, (group,), lambda r: cast(load(x, *ijk[:-1], ijk[-1] * group + r), F32))
            return apply(bound, found, const(0.0, F32))

        return value

    def safe_scale(*at: Dim) -> Scalar:
        """A group of zeros has scale 0."""
        value = cast(load(scale, *at), F32)
        return apply(Fn.SELECT, apply(Fn.EQ, value, const(0.0, F32)), const(1.0, F32), value)

    def scaled(*at: Dim) -> Scalar:
        if zero is None:
            widest = apply(Fn.MAX, load(high, *at), apply(Fn.NEG, load(low, *at)))
            return cast(apply(Fn.DIV, widest, const(MOST[bits], F32)), scale.dtype)
        return cast(apply(Fn.DIV, apply(Fn.SUB, load(high, *at), load(low, *at)), const(2**bits - 1, F32)), scale.dtype)

    def within(value: Scalar) -> Scalar:
        return apply(Fn.MIN, apply(Fn.MAX, value, smallest), largest)

    def origin(*at: Dim) -> Scalar:
        steps = apply(Fn.ROUND, apply(Fn.DIV, load(low, *at), safe_scale(*at)))
        return cast(within(apply(Fn.SUB, smallest, steps)), q.dtype)

    def number(at: tuple[Dim, ...], r: Dim) -> Scalar:
        steps = apply(Fn.ROUND, apply(Fn.DIV, cast(load(x, *at[:-1], at[-1] * group + r), F32), safe_scale(*at)))
        middle = const(MIDDLE if bits == 4 else 0, F32) if zero is None else cast(load(zero, *at), F32)
        return cast(within(apply(Fn.ADD, steps, middle)), q.dtype)

    def put(*ijk: Dim) -> Stmt:
        """Group by group, so that a row of the schedule is a group."""
        *at, j = ijk
        if bits == 8:
            value = number(tuple(at), j)
        else:
            upper = apply(Fn.SHL, number(tuple(at), j * 2 + 1), const(4, U8))
            value = apply(Fn.OR, number(tuple(at), j * 2), upper)
        return store(q, (*at[:-1], at[-1] * per_group + j), value)

    stages = [fill(low, extreme(ReduceFn.MIN, Fn.MIN)), fill(high, extreme(ReduceFn.MAX, Fn.MAX)), fill(scale, scaled)]
    if zero is not None:
        stages.append(fill(zero, origin))
    per_group = group * bits // 8
    stages.append(loops((*scale.shape, per_group), put))
    return Nest(outputs, Allocate(low, Allocate(high, seq(*stages))))


def _quantize_numpy(x: Any, *, bits: int, group: int, symmetric: bool, dtype: str) -> Any:
    one = np.float32(1)
    grouped = x.astype(np.float32).reshape(*x.shape[:-1], -1 if x.shape[-1] else 1, group or x.shape[-1])
    low, high = grouped.min(-1, initial=0), grouped.max(-1, initial=0)
    span = np.maximum(high, -low) / np.float32(MOST[bits]) if symmetric else (high - low) / np.float32(2**bits - 1)
    scale = span.astype(DType(dtype).numpy)
    wide = scale.astype(np.float32)
    safe = np.where(wide == 0, one, wide)
    smallest, largest = _levels(bits)
    holds = np.int8 if bits == 8 else np.uint8
    zero = np.clip(smallest - np.rint(low / safe), smallest, largest).astype(holds)
    middle = (zero.astype(np.float32) if not symmetric else np.full_like(wide, MIDDLE if bits == 4 else 0))[..., None]
    q = np.clip(np.rint(grouped / safe[..., None]) + middle, smallest, largest).astype(holds).reshape(x.shape)
    if bits == 4:
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    return (q, scale) if symmetric else (q, scale, zero)


QUANTIZE = define(
    "quantize", "x", _quantize_type, _quantize_numpy, _quantize_nest, {"bits": 8, "group": 0, "symmetric": True, "dtype": "f32"}
)
