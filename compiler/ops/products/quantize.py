"""Quantisation of floats to integers: x = (q - zero) * scale, with one scale per group of `group` consecutive elements of the last axis.

    q       i8 [..., k], or u8 [..., k / 2] with two 4-bit numbers per byte: the lower four bits hold the number with the even index.
            If the attribute `group` is 0, the whole axis is one group.
            If the attribute `bits` is 6, all numbers are at least -32 and less than 32, and products may store them in 6 bits
    scale   [..., k / group]; a single group as long as the axis gives one scale per channel
    zero    shaped like scale, in units of q; without it the numbers are symmetric around 0 (4 bits: around 8)
    shift   takes the place of zero if the attribute `shifted` is true: x = q * scale - shift

If the attribute `kind` is e2m1, a 4-bit number is the bits of a float instead, and scale multiplies the double of that float. If `kind` is
another name of a table (compiler/ir/numbers.py), such as iq4, a 4-bit number is an index of that table. If `kind` is e4m3, q holds floats
of 8 bits.

Dequantising is an ordinary loop nest; fusion moves it into the product that reads its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Kernel, cast, const, equal, fold, index, largest, maximum, minimum, round_half_even, select
from compiler.ir.numbers import TABLES, Kind, stored_as
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType, TupleType, Type
from compiler.machine.formats import looked_up
from compiler.ops.broadcast import output, sized_buffer
from compiler.ops.operands import agree, bool_attr, dtype_attr, int_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I32, U8 = DType.F32, DType.I8, DType.I32, DType.U8
MIDDLE = 8  # zero point of symmetric 4-bit numbers
STORED = (8, 6, 4)  # bit widths of numbers that can be dequantised
MOST = {8: 127, 4: 7}  # largest magnitude of a symmetric number, per bit width


def bits_attr(attrs: Attrs, known: Iterable[int]) -> int:
    bits = int_attr(attrs, "bits")
    if bits not in known:
        raise AnnotationError(f"attribute bits is {bits}, expected {' or '.join(map(str, known))}")
    return bits


def group_of(attrs: Attrs, length: Dim) -> Dim:
    """Return the length of a group. The attribute `group` is 0 if the whole axis is one group. Raise AnnotationError if the axis is not
    proved to consist of whole groups."""
    group = int_attr(attrs, "group", 0)
    if group and not prove_divisible(length, group):
        raise AnnotationError(f"the last dimension is {length}, expected a multiple of the group size, {group}")
    return Dim.of(group) if group else length


def num_groups(attrs: Attrs, length: Dim) -> Dim:
    """Return the number of groups of an axis of this length."""
    return length // group_of(attrs, length) if attrs["group"] else Dim.of(1)


# --- dequantize --------------------------------------------------------------------------------------------------------


def _dequantize_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    q, dtype, bits = tensor_operand(args, 0, "q"), dtype_attr(attrs), bits_attr(attrs, STORED)
    if not dtype.is_float:
        raise AnnotationError(f"attribute dtype is {dtype}, expected a float")
    if attrs["kind"] not in tuple(Kind):
        raise AnnotationError(f"attribute kind is {attrs['kind']!r}, expected one of {', '.join(Kind)}")
    if attrs["kind"] in TABLES and (bits != 4 or len(args) != 2):
        raise AnnotationError(f"attribute kind is {attrs['kind']}, expected 4 bits and no offset")
    if attrs["kind"] == Kind.E4M3 and (bits != 8 or len(args) != 2):
        raise AnnotationError(f"attribute kind is {Kind.E4M3}, expected 8 bits and no offset")
    holds = stored_as(bits, Kind(attrs["kind"]))
    if q.dtype not in (None, holds):
        raise AnnotationError(f"q holds {q.dtype}, expected {holds} for {bits} bits")
    if q.ndim == 0:
        raise AnnotationError("q has rank 0, expected at least 1")
    if q.shape is None:
        return TensorType(None, dtype, q.ndim)
    shape = (*q.shape[:-1], q.shape[-1] * (8 // bits))
    groups = (*shape[:-1], num_groups(attrs, shape[-1]))
    for i, name in enumerate(("scale", "zero")[: len(args) - 1], 1):
        given = tensor_operand(args, i, name, ndim=len(shape), layout="[..., groups]")
        for d, (w, g) in enumerate(zip(groups, given.shape or groups, strict=True)):
            agree(w, g, f"dimension {d} of {name}")
    wants_float(tensor_operand(args, 1, "scale"), "scale")
    if bool_attr(attrs, "shifted"):
        if len(args) < 3:
            raise AnnotationError("attribute shifted is true, expected a shift")
        wants_float(tensor_operand(args, 2, "shift"), "shift")
    return TensorType(shape, dtype)


def _dequantize_nest(operands: Operands) -> Nest:
    kernel, attrs = Kernel(), operands.attrs
    out, q, scale = kernel.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    zero = kernel.array(operands.buffer(2)) if operands.has(2) else None
    length, bits = out.shape[-1], attrs["bits"]
    with kernel.nest(out.shape) as (*row, k):
        group = k // group_of(attrs, length) if attrs["group"] else 0
        stored = half_byte(q.buffer, row, k) if bits == 4 else q[*row, k]
        number = cast(looked_up(stored, Kind(attrs["kind"])) if attrs["kind"] in TABLES else stored, F32)
        if zero is not None and not attrs["shifted"]:
            number = number - cast(zero[*row, group], F32)
        elif bits == 4 and zero is None and attrs["kind"] == Kind.INT:
            number = number - MIDDLE
        value = number * cast(scale[*row, group], F32)
        if zero is not None and attrs["shifted"]:
            value = value - cast(zero[*row, group], F32)
        out[*row, k] = cast(value, out.dtype)
    groups = (*out.shape[:-1], num_groups(attrs, length))
    checks = unproved(operands, dict.fromkeys(range(1, len(operands.places)), groups))
    return Nest((out.buffer,), kernel.body(), checks=checks)


def half_byte(q: Buffer, row: Sequence[Dim], k: Dim) -> Scalar:
    """Return the 4-bit number at index `k` of a row, as an i32."""
    return cast(Load(q, (*row, k // 2)), I32) >> cast(index(k % 2 * 4), I32) & 15


def half_bytes(q: Any) -> Any:
    """Return the two 4-bit numbers of each byte of the rows, in NumPy: the lower four bits first."""
    return np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], 2 * q.shape[-1])


def _spread(x: Any, length: int) -> Any:
    return np.repeat(x.astype(np.float32), length // max(1, x.shape[-1]), -1)


def _dequantize_numpy(q: Any, scale: Any, zero: Any = None, *, bits: int, group: int, dtype: str, shifted: bool, kind: str) -> Any:
    if bits == 4:
        q = half_bytes(q)
    wide = (TABLES[Kind(kind)][q] if kind in TABLES else q).astype(np.float32)
    length = wide.shape[-1]
    if zero is not None and not shifted:
        wide = wide - _spread(zero, length)
    elif bits == 4 and zero is None and kind == Kind.INT:
        wide = wide - np.float32(MIDDLE)
    value = wide * _spread(scale, length)
    return (value - _spread(zero, length) if shifted else value).astype(DType(dtype).numpy)


DEQUANTIZE = define(
    "dequantize",
    "q, scale, zero?",
    _dequantize_type,
    _dequantize_numpy,
    _dequantize_nest,
    {"bits": 8, "group": 0, "dtype": "f32", "shifted": False, "kind": str(Kind.INT)},
)


# --- quantize ----------------------------------------------------------------------------------------------------------


def _levels(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest number of this bit width."""
    return (-128, 127) if bits == 8 else (0, 15)


def _quantize_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: q and scale if the quantisation is symmetric, else q, scale and zero."""
    x, dtype, bits = wants_float(tensor_operand(args, 0, "x"), "x"), dtype_attr(attrs), bits_attr(attrs, MOST)
    holds = I8 if bits == 8 else U8
    if not dtype.is_float:
        raise AnnotationError(f"attribute dtype is {dtype}, expected a float")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, expected at least 1")
    if x.shape is None:
        kinds = [TensorType(None, d, x.ndim) for d in (holds, dtype, holds)]
    else:
        *row, length = x.shape
        groups = (*row, num_groups(attrs, length))
        if bits == 4 and not prove_divisible(length, 2):
            raise AnnotationError(f"the last dimension is {length}, expected an even number for 4 bits")
        if bits == 4 and not prove_divisible(group_of(attrs, length), 2):
            raise AnnotationError(f"attribute group is {attrs['group']}, expected an even number for 4 bits")
        kinds = [TensorType((*row, length * bits // 8), holds), TensorType(groups, dtype), TensorType(groups, holds)]
    return TupleType(tuple(kinds[:2] if bool_attr(attrs, "symmetric") else kinds))


def _quantize_nest(operands: Operands) -> Nest:
    """Compute each group's range, its scale as rounded for storage, its zero point (unless `symmetric`) and its quantised numbers."""
    k, attrs, out = Kernel(), operands.attrs, operands.out
    assert isinstance(out, TupleType)
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, ("q", "scale", "zero"), strict=False))
    x, q, scale = k.arrays(operands.buffer(0), *outputs[:2])
    zero = None if attrs["symmetric"] else k.array(outputs[2])
    bits, group = attrs["bits"], group_of(attrs, x.shape[-1])
    least, most = _levels(bits)
    low, high = k.workspace("low", *scale.shape), k.workspace("high", *scale.shape)

    def safe_scale(*at: Dim) -> Scalar:
        """Return the scale as a divisor. For a scale of 0, such as that of a group of zeros, the divisor is 1."""
        value = cast(scale[at], F32)
        return select(equal(value, 0.0), const(1.0, F32), value)

    def clipped(value: Scalar) -> Scalar:
        return cast(minimum(maximum(value, least), most), q.dtype)

    def number(row: list[Dim], g: Dim, r: Dim) -> Scalar:
        steps = round_half_even(cast(x[*row, g * group + r], F32) / safe_scale(*row, g))
        middle = (MIDDLE if bits == 4 else 0) if zero is None else cast(zero[*row, g], F32)
        return clipped(steps + middle)

    with k.nest(scale.shape) as (*row, g):
        low[*row, g] = minimum(fold(ReduceFn.MIN, (group,), lambda r: cast(x[*row, g * group + r], F32)), 0.0)
    with k.nest(scale.shape) as (*row, g):
        high[*row, g] = maximum(largest((group,), lambda r: cast(x[*row, g * group + r], F32)), 0.0)
    with k.nest(scale.shape) as at:
        step = maximum(high[at], -low[at]) / MOST[bits] if zero is None else (high[at] - low[at]) / (2**bits - 1)
        scale[at] = cast(step, scale.dtype)
    if zero is not None:
        with k.nest(zero.shape) as at:
            zero[at] = clipped(least - round_half_even(low[at] / safe_scale(*at)))
    bytes_per_group = group * bits // 8
    with k.nest((*scale.shape, bytes_per_group)) as (*row, g, j):  # the schedule treats each group as a row
        value = number(row, g, j) if bits == 8 else number(row, g, j * 2) | number(row, g, j * 2 + 1) << 4
        q[*row, g * bytes_per_group + j] = value
    return Nest(outputs, k.body())


def _quantize_numpy(x: Any, *, bits: int, group: int, symmetric: bool, dtype: str) -> Any:
    one = np.float32(1)
    length = x.shape[-1]
    grouped = x.astype(np.float32).reshape(*x.shape[:-1], length // group if group else 1, group or length)
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
