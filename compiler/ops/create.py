"""Operators that make tensors from shapes and numbers, convert shapes to tensors and back, pad tensors, and zero the upper triangles of
matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, guard, index, less_equal, select
from compiler.ir.op import REQUIRED
from compiler.ir.relations import Relation, at_least
from compiler.ir.types import ObjectType, ScalarType, ShapeType, TensorType, Type
from compiler.ops.broadcast import element, output
from compiler.ops.elementwise import numpy_cast
from compiler.ops.manipulate import wanted_shape
from compiler.ops.operands import dim_attr, dims_attr, dtype_attr, float_attr, int_attr, shape_operand, tensor_operand
from compiler.ops.tables import Nest, Operands, UnknownShape, define

Attrs = Mapping[str, Any]


# --- tensors filled with numbers ---------------------------------------------------------------------------------------


def _full_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    shape, dtype = wanted_shape(args, 0), dtype_attr(attrs)
    if not isinstance(args[1], ScalarType | ObjectType):
        raise AnnotationError(f"value is {args[1]}, expected a scalar")
    return TensorType(shape.dims, dtype, shape.ndim)


def _full_nest(operands: Operands) -> Nest:
    k = Kernel()
    out = k.array(output(operands))
    with k.nest(out.shape) as at:
        out[at] = element(operands.places[1], at, out.dtype)
    return Nest((out.buffer,), k.body())


FULL = define(
    "full",
    "shape, value",
    _full_type,
    lambda shape, value, dtype: np.full(shape, numpy_cast(np.asarray(value), DType(dtype))),
    _full_nest,
    {"dtype": REQUIRED},
)


def _count(attrs: Attrs) -> Dim:
    """Return the number of elements start, start + step, ... below `stop`."""
    return ceil_div(dim_max(dim_attr(attrs, "stop") - dim_attr(attrs, "start"), 0), int_attr(attrs, "step", 1))


def _arange_type(_: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = dtype_attr(attrs)
    if dtype is DType.BOOL:
        raise AnnotationError("attribute dtype is bool, expected numbers")
    return TensorType((_count(attrs),), dtype)


def _arange_nest(operands: Operands) -> Nest:
    k, attrs = Kernel(), operands.attrs
    out = k.array(output(operands))
    start, step = dim_attr(attrs, "start"), int_attr(attrs, "step", 1)
    with k.nest(out.shape) as (i,):
        out[i] = cast(index(start + i * step), out.dtype)
    return Nest((out.buffer,), k.body())


def _arange_numpy(*, start: int, stop: int, step: int, dtype: str) -> Any:
    return np.arange(start, stop, step).astype(DType(dtype).numpy)


# Returns start, start + step, ... below stop; start and stop may be symbolic.
ARANGE = define("arange", "", _arange_type, _arange_numpy, _arange_nest, {"start": 0, "stop": REQUIRED, "step": 1, "dtype": "i64"})


# --- shapes as values --------------------------------------------------------------------------------------------------


def _shape_of_type(args: tuple[Type, ...], _: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    return ShapeType(x.shape, x.ndim)


SHAPE_OF = define("shape_of", "x", _shape_of_type, lambda x: x.shape, None)


def _to_shape_type(args: tuple[Type, ...], _: Attrs) -> Type:
    """Deduce a shape of unknown extents, since the extents are data. A match_cast of the result names the extents."""
    x = tensor_operand(args, 0, "x", ndim=1)
    if x.dtype not in (None, DType.I64):
        raise AnnotationError(f"x holds {x.dtype}, expected i64; cast first")
    return ShapeType(None, x.shape[0].const if x.shape is not None and x.shape[0].is_const else None)


TENSOR_TO_SHAPE = define("tensor_to_shape", "x", _to_shape_type, lambda x: tuple(map(int, x)), None)


def _to_tensor_type(args: tuple[Type, ...], _: Attrs) -> Type:
    shape = shape_operand(args, 0, "shape")
    return TensorType(None if shape.ndim is None else (Dim.of(shape.ndim),), DType.I64, 1)


def _to_tensor_nest(operands: Operands) -> Nest:
    k, shape = Kernel(), operands.types[0]
    if not isinstance(shape, ShapeType) or shape.dims is None:
        raise UnknownShape(f"the shape is {shape}, and a loop nest needs its dimensions; state them with match_cast")
    out = k.array(output(operands))
    for i, dim in enumerate(shape.dims):
        out[i] = dim
    if not shape.dims:
        with k.nest(out.shape) as at:  # a loop without iterations, since a kernel needs at least one statement
            out[at] = 0
    return Nest((out.buffer,), k.body())


SHAPE_TO_TENSOR = define("shape_to_tensor", "shape", _to_tensor_type, lambda shape: np.array(shape, np.int64), _to_tensor_nest)


# --- padding and triangles ---------------------------------------------------------------------------------------------


def _widths(attrs: Attrs, ndim: int) -> tuple[tuple[Dim, Dim], ...]:
    before, after = dims_attr(attrs, "before"), dims_attr(attrs, "after")
    if len(before) != ndim or len(after) != ndim:
        raise AnnotationError(f"attributes before and after have {len(before)} and {len(after)} widths, expected {ndim} of each")
    return tuple(zip(before, after, strict=True))


def _pad_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    value = float_attr(attrs, "value")
    number = bool(value) if x.dtype is DType.BOOL and value in (0, 1) else value
    if x.dtype is not None and not x.dtype.holds(number):
        raise AnnotationError(f"attribute value is {value:g}, expected a number of type {x.dtype}")
    if x.ndim is None:
        return x
    widths = _widths(attrs, x.ndim)
    if x.shape is None:
        return x
    return TensorType(tuple(b + d + a for d, (b, a) in zip(x.shape, widths, strict=True)), x.dtype)


def _pad_relations(_: tuple[Type, ...], attrs: Attrs) -> Iterable[Relation]:
    for name in ("before", "after"):
        for axis, width in enumerate(dims_attr(attrs, name)):
            yield at_least(width, 0, f"entry {axis} of attribute {name}")


def _pad_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    widths = _widths(operands.attrs, len(x.shape))
    with k.nest(out.shape) as at:
        inner = tuple(i - before for i, (before, _) in zip(at, widths, strict=True))
        value: Scalar = x[inner]
        for i, extent, (before, after) in zip(inner, x.shape, widths, strict=True):
            if before.terms or after.terms:
                value = guard(0, i, extent, value, operands.attrs["value"])
        out[at] = value
    return Nest((out.buffer,), k.body())


def _pad_numpy(x: Any, before: tuple[int, ...], after: tuple[int, ...], value: float) -> Any:
    widths = tuple(zip(before, after, strict=True))
    return np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype)) if widths else x.copy()


PAD = define("pad", "x", _pad_type, _pad_numpy, _pad_nest, {"before": REQUIRED, "after": REQUIRED, "value": 0}, relations=_pad_relations)


def _tril_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    dim_attr(attrs, "k")
    if x.ndim is not None and x.ndim < 2:
        raise AnnotationError(f"x has rank {x.ndim}, expected at least 2")
    return x


def _tril_nest(operands: Operands) -> Nest:
    """Keep the elements on and below the diagonal that is `k` columns right of the main diagonal. Set all other elements to 0."""
    kernel = Kernel()
    out, x = kernel.arrays(output(operands), operands.buffer(0))
    rows, columns = x.shape[-2:]
    k = dim_max(dim_min(dim_attr(operands.attrs, "k"), columns), -rows)  # clamped, because i + k would overflow for the largest integers
    with kernel.nest(out.shape) as (*batch, i, j):
        out[*batch, i, j] = select(less_equal(j, i + k), x[*batch, i, j], 0)
    return Nest((out.buffer,), kernel.body())


def _tril_numpy(x: Any, k: int) -> Any:
    rows, columns = x.shape[-2:]
    return np.tril(x, max(-rows, min(k, columns)))


TRIL = define("tril", "x", _tril_type, _tril_numpy, _tril_nest, {"k": 0})
