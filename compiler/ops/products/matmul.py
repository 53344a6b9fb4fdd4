"""Matrix products. Floats of every type are multiplied and summed in f32, and the result is rounded once. Integers are multiplied and added
in the result's type. The attribute `tolerates` of `linear` names a type to which a back end may round x, for machines that multiply that
type faster: bf16, or i8 with a scale per group if the weights are quantised integers. The reference interpretation of `linear` does not
round x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, contract
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import Shape, broadcast_shapes, element, fits, output
from compiler.ops.operands import agree, bool_attr, dtype_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32


def _out_dtype(x: TensorType, attrs: Mapping[str, Any]) -> DType | None:
    return x.dtype if attrs["out_dtype"] is None else dtype_attr(attrs, "out_dtype")


# --- linear ------------------------------------------------------------------------------------------------------------


def _linear_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    x = wants_float(tensor_operand(args, 0, "x"), "x")
    w = tensor_operand(args, 1, "weight", ndim=2, layout="[out, in]")
    dtype = _out_dtype(x, attrs)
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, expected at least 1: [..., in]")
    if len(args) > 2:
        bias = tensor_operand(args, 2, "bias", ndim=1, layout="[out]")
        if bias.shape is not None and w.shape is not None:
            agree(w.shape[0], bias.shape[0], "the length of bias")
    if w.shape is None or x.shape is None:
        return TensorType(None, dtype, x.ndim)
    agree(w.shape[1], x.shape[-1], "the last dimension of x")
    return TensorType((*x.shape[:-1], w.shape[0]), dtype)


def _linear_numpy(x: Any, w: Any, bias: Any = None, *, out_dtype: str | None, tolerates: str | None) -> Any:
    dtype = x.dtype if out_dtype is None else DType(out_dtype).numpy
    y = x.astype(np.float32) @ w.astype(np.float32).T
    return (y if bias is None else y + bias.astype(np.float32)).astype(dtype)


def _linear_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x, w = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    bias = k.array(operands.buffer(2)) if operands.has(2) else None
    with k.nest(out.shape) as (*rows, n):
        y: Scalar = contract(x.shape[-1], lambda r: cast(x[*rows, r], F32), lambda r: cast(w[n, r], F32))
        if bias is not None:
            y = y + cast(bias[n], F32)
        out[*rows, n] = cast(y, out.dtype)
    wanted = {1: (w.shape[0], x.shape[-1])} | ({} if bias is None else {2: (w.shape[0],)})
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


# out = x @ weight.T + bias, with x [..., in]. The result has the type `out_dtype`, or by default that of x.
LINEAR = define("linear", "x, weight, bias?", _linear_type, _linear_numpy, _linear_nest, {"out_dtype": None, "tolerates": None})


# --- matmul ------------------------------------------------------------------------------------------------------------


def _matrix(shape: Shape, transposed: bool) -> Shape:
    """Return the numbers of rows and columns of the matrix, after transposition if `transposed`."""
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def _matmul_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    a, b = tensor_operand(args, 0, "a"), tensor_operand(args, 1, "b")
    dtype = _out_dtype(a, attrs)
    flipped = bool_attr(attrs, "transpose_a"), bool_attr(attrs, "transpose_b")
    if a.dtype is not None and b.dtype is not None and a.dtype.is_float != b.dtype.is_float:
        raise AnnotationError(f"operands have element types {a.dtype} and {b.dtype}, expected floats or integers; cast one")
    if DType.BOOL in (a.dtype, b.dtype, dtype):
        raise AnnotationError("operands or result are bool, expected numbers; cast first")
    for name, x in (("a", a), ("b", b)):
        if x.ndim is not None and x.ndim < 2:
            raise AnnotationError(f"{name} has rank {x.ndim}, expected at least 2")
    if a.shape is None or b.shape is None:
        return TensorType(None, dtype, None if a.ndim is None or b.ndim is None else max(a.ndim, b.ndim))
    (m, k), (k2, n) = _matrix(a.shape, flipped[0]), _matrix(b.shape, flipped[1])
    agree(k, k2, "the contracted dimension of b")
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType((*batch, m, n), dtype)


def _matmul_numpy(a: Any, b: Any, *, transpose_a: bool, transpose_b: bool, out_dtype: str | None) -> Any:
    dtype = a.dtype if out_dtype is None else DType(out_dtype).numpy
    wide = np.float32 if DType.from_numpy(a.dtype).is_float else dtype
    a, b = a.astype(wide), b.astype(wide)
    return np.matmul(np.swapaxes(a, -1, -2) if transpose_a else a, np.swapaxes(b, -1, -2) if transpose_b else b).astype(dtype)


def _matmul_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, a, b = k.array(output(operands)), operands.buffer(0), operands.buffer(1)
    flipped_a, flipped_b = operands.attrs["transpose_a"], operands.attrs["transpose_b"]
    wide = F32 if a.dtype.is_float else out.dtype
    _, length = _matrix(a.shape, flipped_a)
    batches, columns = out.shape[:-2], out.shape[-1]
    with k.nest(out.shape) as (*batch, m, n):

        def left(r: Dim) -> Scalar:
            at = (*batch, r, m) if flipped_a else (*batch, m, r)
            return cast(element(a, at, a.dtype, (*batches, *a.shape[-2:])), wide)

        def right(r: Dim) -> Scalar:
            at = (*batch, n, r) if flipped_b else (*batch, r, n)
            return cast(element(b, at, b.dtype, (*batches, *b.shape[-2:])), wide)

        out[*batch, m, n] = cast(contract(length, left, right), out.dtype)
    wanted = {1: (*b.shape[:-2], *((columns, length) if flipped_b else (length, columns)))}
    stretched = (fit for i, x in enumerate((a, b)) for fit in fits(i, x.shape[:-2], batches))
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted), fits=tuple(stretched))


# out = a @ b, each transposed in its last two axes if the attributes say so. The other axes broadcast. The result has the type `out_dtype`,
# or by default that of a.
MATMUL = define(
    "matmul", "a, b", _matmul_type, _matmul_numpy, _matmul_nest, {"transpose_a": False, "transpose_b": False, "out_dtype": None}
)
