"""Tensors made of nothing but shapes and numbers, shapes as values, and triangles of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Fn, Scalar
from compiler.ir.op import REQUIRED, OpDef
from compiler.ir.prove import prove_lt
from compiler.ir.types import ObjectType, ScalarType, ShapeType, TensorType, Type
from compiler.ops.broadcast import element, output
from compiler.ops.manipulate import wanted_shape
from compiler.ops.nest import apply, cast, const, fill, guard, index_value, load, seq, store
from compiler.ops.operands import dim_attr, dims_attr, dtype_attr, float_attr, int_attr, shape_operand, tensor_operand
from compiler.ops.tables import Nest, Operands, UnknownShape, define

Attrs = Mapping[str, Any]


# --- filled ------------------------------------------------------------------------------------------------------------


def _full_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    shape, dtype = wanted_shape(args, 0), dtype_attr(attrs)
    if not isinstance(args[1], ScalarType | ObjectType):
        raise AnnotationError(f"value is {args[1]}, wants a scalar")
    return TensorType(shape.dims, dtype, shape.ndim)


def _full_nest(operands: Operands) -> Nest:
    out = output(operands)
    return Nest((out,), fill(out, lambda *ijk: element(operands.places[1], ijk, out.dtype)))


FULL = define(
    "full",
    "shape, value",
    _full_type,
    lambda shape, value, dtype: np.full(shape, value, DType(dtype).numpy),
    _full_nest,
    {"dtype": REQUIRED},
)


def _count(attrs: Attrs) -> Dim:
    """How many steps lead from `start` to before `stop`."""
    return ceil_div(dim_max(dim_attr(attrs, "stop") - dim_attr(attrs, "start"), 0), int_attr(attrs, "step", 1))


def _arange_type(_: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = dtype_attr(attrs)
    if dtype is DType.BOOL:
        raise AnnotationError("attribute dtype is bool, wants numbers")
    return TensorType((_count(attrs),), dtype)


def _arange_nest(operands: Operands) -> Nest:
    out, attrs = output(operands), operands.attrs
    start, step = dim_attr(attrs, "start"), int_attr(attrs, "step", 1)
    return Nest((out,), fill(out, lambda i: cast(index_value(start + i * step), out.dtype)))


def _arange_numpy(*, start: int, stop: int, step: int, dtype: str) -> Any:
    return np.arange(start, stop, step).astype(DType(dtype).numpy)


# start, start + step, ... below stop; both ends may be symbolic.
ARANGE = define("arange", "", _arange_type, _arange_numpy, _arange_nest, {"start": 0, "stop": REQUIRED, "step": 1, "dtype": "i64"})


# --- shapes as values --------------------------------------------------------------------------------------------------


def _shape_of_type(args: tuple[Type, ...], _: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    return ShapeType(x.shape, x.ndim)


SHAPE_OF = define("shape_of", "x", _shape_of_type, lambda x: x.shape, None)


def _to_shape_type(args: tuple[Type, ...], _: Attrs) -> Type:
    """The numbers are data: a match_cast behind it gives them names."""
    x = tensor_operand(args, 0, "x", ndim=1)
    if x.dtype not in (None, DType.I64):
        raise AnnotationError(f"x holds {x.dtype}, wants i64; cast first")
    return ShapeType(None, x.shape[0].const if x.shape is not None and x.shape[0].is_const else None)


TENSOR_TO_SHAPE = define("tensor_to_shape", "x", _to_shape_type, lambda x: tuple(map(int, x)), None)


def _to_tensor_type(args: tuple[Type, ...], _: Attrs) -> Type:
    shape = shape_operand(args, 0, "shape")
    return TensorType(None if shape.ndim is None else (Dim.of(shape.ndim),), DType.I64, 1)


def _to_tensor_nest(operands: Operands) -> Nest:
    out, shape = output(operands), operands.types[0]
    if not isinstance(shape, ShapeType) or shape.dims is None:
        raise UnknownShape(f"the shape is {shape}, and a loop nest needs its dimensions; state them with match_cast")
    if not shape.dims:
        return Nest((out,), fill(out, lambda _: const(0, DType.I64)))
    return Nest((out,), seq(*(store(out, (i,), index_value(d)) for i, d in enumerate(shape.dims))))


SHAPE_TO_TENSOR = define("shape_to_tensor", "shape", _to_tensor_type, lambda shape: np.array(shape, np.int64), _to_tensor_nest)


# --- borders and triangles ---------------------------------------------------------------------------------------------


def _widths(attrs: Attrs, ndim: int) -> tuple[tuple[Dim, Dim], ...]:
    before, after = dims_attr(attrs, "before"), dims_attr(attrs, "after")
    if len(before) != ndim or len(after) != ndim:
        raise AnnotationError(f"attributes before and after have {len(before)} and {len(after)} widths, wants {ndim} of each")
    for width in (*before, *after):
        if prove_lt(width, 0):
            raise AnnotationError(f"a width is {width}, wants at least 0")
    return tuple(zip(before, after, strict=True))


def _pad_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    float_attr(attrs, "value")
    if x.ndim is None:
        return x
    widths = _widths(attrs, x.ndim)
    if x.shape is None:
        return x
    return TensorType(tuple(b + d + a for d, (b, a) in zip(x.shape, widths, strict=True)), x.dtype)


def _pad_nest(operands: Operands) -> Nest:
    out, x = output(operands), operands.buffer(0)
    widths = _widths(operands.attrs, len(x.shape))
    around = const(operands.attrs["value"], x.dtype)

    def value(*ijk: Dim) -> Scalar:
        inner = [i - before for i, (before, _) in zip(ijk, widths, strict=True)]
        result: Scalar = load(x, *inner)
        for i, extent, (before, after) in zip(inner, x.shape, widths, strict=True):
            if before.terms or after.terms:
                result = guard(0, i, extent, result, around)
        return result

    return Nest((out,), fill(out, value))


def _pad_numpy(x: Any, before: tuple[int, ...], after: tuple[int, ...], value: float) -> Any:
    widths = tuple(zip(before, after, strict=True))
    return np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype)) if widths else x.copy()


PAD = define("pad", "x", _pad_type, _pad_numpy, _pad_nest, {"before": REQUIRED, "after": REQUIRED, "value": 0})


def _triangle_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    dim_attr(attrs, "k")
    if x.ndim is not None and x.ndim < 2:
        raise AnnotationError(f"x has rank {x.ndim}, wants at least 2")
    return x


def _triangle(name: str, numpy: Any, *, lower: bool) -> OpDef:
    """The elements on and below (above) the diagonal that is `k` above the main one; the others are 0."""

    def nest(operands: Operands) -> Nest:
        out, x = output(operands), operands.buffer(0)
        k = dim_attr(operands.attrs, "k")

        def value(*ijk: Dim) -> Scalar:
            row, column = index_value(ijk[-2] + k), index_value(ijk[-1])
            kept = apply(Fn.LE, column, row) if lower else apply(Fn.LE, row, column)
            return apply(Fn.SELECT, kept, load(x, *ijk), const(0, x.dtype))

        return Nest((out,), fill(out, value))

    return define(name, "x", _triangle_type, lambda x, k: numpy(x, k), nest, {"k": 0})


TRIL = _triangle("tril", np.tril, lower=True)
TRIU = _triangle("triu", np.triu, lower=False)
