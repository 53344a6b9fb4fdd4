"""Products of matrices. Terms are multiplied and summed in f32 whatever the operands' types, and the sum is rounded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Fn, ReduceFn, Scalar
from compiler.ir.prove import prove_eq, prove_ne
from compiler.ir.types import ObjectType, TensorType, Type
from compiler.ops.broadcast import broadcast_shapes, element, output
from compiler.ops.nest import accumulator, apply, cast, fill, load, reduce
from compiler.ops.tables import Nest, Operands, define


def contracted(a: Dim, b: Dim) -> Dim:
    """Two extents that must agree."""
    if prove_ne(a, b):
        raise AnnotationError(f"the contracted dimensions are {a} and {b}")
    return a


def _tensor(type_: Type, name: str) -> TensorType:
    if not isinstance(type_, TensorType):
        raise AnnotationError(f"{name} is {type_}, wants a tensor")
    return type_


def _out_dtype(x: TensorType, attrs: Mapping[str, Any]) -> DType | None:
    return x.dtype if attrs["out_dtype"] is None else DType(attrs["out_dtype"])


# --- linear ------------------------------------------------------------------------------------------------------------


def _linear_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    if any(isinstance(a, ObjectType) for a in args):
        return ObjectType()
    x, w = _tensor(args[0], "x"), _tensor(args[1], "the weight")
    dtype = _out_dtype(x, attrs)
    if w.shape is None or x.shape is None:
        return TensorType(None, dtype, x.ndim)
    if len(w.shape) != 2:
        raise AnnotationError(f"the weight has rank {len(w.shape)}, wants 2: [out, in]")
    contracted(x.shape[-1], w.shape[1])
    return TensorType((*x.shape[:-1], w.shape[0]), dtype)


def _linear_numpy(x: Any, w: Any, bias: Any = None, *, out_dtype: str | None) -> Any:
    dtype = x.dtype if out_dtype is None else DType(out_dtype).numpy
    y = x.astype(np.float32) @ w.astype(np.float32).T
    return (y if bias is None else y + bias.astype(np.float32)).astype(dtype)


def _linear_nest(operands: Operands) -> Nest:
    out, x, w = output(operands), operands.buffer(0), operands.buffer(1)
    bias = operands.buffer(2) if operands.has(2) else None

    def value(*ijk: Dim) -> Scalar:
        *rows, n = ijk
        terms = reduce(
            ReduceFn.SUM,
            (x.shape[-1],),
            lambda r: apply(Fn.MUL, cast(load(x, *rows, r), DType.F32), cast(load(w, n, r), DType.F32)),
        )
        total = terms if bias is None else apply(Fn.ADD, terms, cast(load(bias, n), DType.F32))
        return cast(total, out.dtype)

    checks = () if prove_eq(x.shape[-1], w.shape[1]) else ((1, TensorType((w.shape[0], x.shape[-1]), w.dtype)),)
    return Nest((out,), fill(out, value), checks=checks)


LINEAR = define("linear", "x, weight, bias?", _linear_type, _linear_numpy, _linear_nest, {"out_dtype": None})


# --- matmul ------------------------------------------------------------------------------------------------------------


def _matmul_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    if any(isinstance(a, ObjectType) for a in args):
        return ObjectType()
    a, b = _tensor(args[0], "a"), _tensor(args[1], "b")
    dtype = _out_dtype(a, attrs)
    if a.shape is None or b.shape is None:
        known = a.ndim is not None and b.ndim is not None
        return TensorType(None, dtype, max(a.ndim or 0, b.ndim or 0) if known else None)
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise AnnotationError(f"operands have rank {len(a.shape)} and {len(b.shape)}, wants at least 2")
    m, k = a.shape[-2:][::-1] if attrs["transpose_a"] else a.shape[-2:]
    k2, n = b.shape[-2:][::-1] if attrs["transpose_b"] else b.shape[-2:]
    contracted(k, k2)
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType((*batch, m, n), dtype) if batch is not None else TensorType(None, dtype, max(len(a.shape), len(b.shape)))


def _matmul_numpy(a: Any, b: Any, *, transpose_a: bool, transpose_b: bool, out_dtype: str | None) -> Any:
    dtype = a.dtype if out_dtype is None else DType(out_dtype).numpy
    wide = accumulator(DType.from_numpy(a.dtype)).numpy
    a, b = a.astype(wide), b.astype(wide)
    return np.matmul(np.swapaxes(a, -1, -2) if transpose_a else a, np.swapaxes(b, -1, -2) if transpose_b else b).astype(dtype)


def _matmul_nest(operands: Operands) -> Nest:
    out, a, b = output(operands), operands.buffer(0), operands.buffer(1)
    attrs = operands.attrs
    wide = accumulator(a.dtype)
    length = a.shape[-2] if attrs["transpose_a"] else a.shape[-1]

    def value(*ijk: Dim) -> Scalar:
        *batch, m, n = ijk

        def term(r: Dim) -> Scalar:
            left = (*batch, r, m) if attrs["transpose_a"] else (*batch, m, r)
            right = (*batch, n, r) if attrs["transpose_b"] else (*batch, r, n)
            return apply(Fn.MUL, cast(element(a, left, a.dtype), wide), cast(element(b, right, b.dtype), wide))

        return cast(reduce(ReduceFn.SUM, (length,), term), out.dtype)

    other = b.shape[-1] if attrs["transpose_b"] else b.shape[-2]
    if prove_eq(length, other):
        return Nest((out,), fill(out, value))
    wanted = (*b.shape[:-1], length) if attrs["transpose_b"] else (*b.shape[:-2], length, b.shape[-1])
    return Nest((out,), fill(out, value), checks=((1, TensorType(wanted, b.dtype)),))


MATMUL = define(
    "matmul", "a, b", _matmul_type, _matmul_numpy, _matmul_nest, {"transpose_a": False, "transpose_b": False, "out_dtype": None}
)
