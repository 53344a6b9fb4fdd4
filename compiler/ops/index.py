"""Operators that read and write elements at indices that are data.

A read clamps its index into the axis, so that a bad index cannot read memory outside the tensor. If there are indices to read along an axis
without elements, a check fails at run time. A write at a bad index is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, maximum, minimum
from compiler.ir.op import REQUIRED
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import output
from compiler.ops.indices import Extent, clamped, skipped
from compiler.ops.operands import agree, axis_attr, same_dtype, tensor_operand, unproved, wants_int
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]
Checks = tuple[tuple[int, Type], ...]


def _replaced(ijk: tuple[Dim, ...], axis: int, index: Dim) -> tuple[Dim, ...]:
    return (*ijk[:axis], index, *ijk[axis + 1 :])


def inside(value: Scalar, extent: Dim) -> Scalar:
    """Return whether an index is in 0 .. extent - 1."""
    wide = cast(value, DType.I64)
    return (wide >= 0) & (wide < extent)


def clamped_index(k: Kernel, name: str, value: Scalar, extent: Dim) -> Dim:
    """Bind `value`, clamped to 0 .. extent - 1, to a variable with this name, and return it as an index."""
    return k.let(name, maximum(minimum(cast(value, DType.I64), extent - 1), 0), extent - 1)


# --- take: whole slices ------------------------------------------------------------------------------------------------


def _take_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x, indices = tensor_operand(args, 0, "x"), wants_int(tensor_operand(args, 1, "indices"), "indices")
    if x.ndim is None or indices.ndim is None:
        return TensorType(None, x.dtype)
    axis = axis_attr(attrs, x.ndim)
    if x.shape is None or indices.shape is None:
        return TensorType(None, x.dtype, x.ndim - 1 + indices.ndim)
    return TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)


def _take_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x, indices = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    axis, count = axis_attr(operands.attrs, len(x.shape)), len(indices.shape)
    extent = x.shape[axis]
    with k.nest(out.shape[: axis + count]) as outer:
        before, at = outer[:axis], outer[axis:]
        index = clamped_index(k, "index", indices[at], extent)
        with k.nest(x.shape[axis + 1 :]) as after:
            out[*outer, *after] = x[*before, index, *after]
    return Nest((out.buffer,), k.body())


def _take_numpy(x: Any, indices: Any, axis: int) -> Any:
    return np.take(x, indices, axis)


# out = x[..., indices, ...]; the indices replace the axis `axis`.
ALONG = Extent("x", "axis")
TAKE = define("take", "x, indices", _take_type, _take_numpy, _take_nest, {"axis": REQUIRED}, indices={"indices": clamped(ALONG)})


# --- gather: element by element ----------------------------------------------------------------------------------------


def _along(x: TensorType, indices: TensorType, attrs: Attrs) -> int | None:
    """Return the axis of `x` that the attribute `axis` names, or None if the rank of `x` is unknown. Raise AnnotationError if the indices
    are no integers, or if the ranks, or the extents of other axes, are proved to differ."""
    wants_int(indices, "indices")
    if x.ndim is not None and indices.ndim is not None and x.ndim != indices.ndim:
        raise AnnotationError(f"indices have rank {indices.ndim}, expected {x.ndim}, the rank of x")
    if x.ndim is None:
        return None
    axis = axis_attr(attrs, x.ndim)
    if x.shape is not None and indices.shape is not None:
        for i, (wanted, given) in enumerate(zip(x.shape, indices.shape, strict=True)):
            if i != axis:
                agree(wanted, given, f"dimension {i} of the indices")
    return axis


def _gather_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x, indices = tensor_operand(args, 0, "x"), tensor_operand(args, 1, "indices")
    _along(x, indices, attrs)
    return TensorType(indices.shape, x.dtype, indices.ndim if indices.ndim is not None else x.ndim)


def _gather_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x, indices = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    axis = axis_attr(operands.attrs, len(x.shape))
    extent = x.shape[axis]
    with k.nest(out.shape) as at:
        index = clamped_index(k, "index", indices[at], extent)
        out[at] = x[_replaced(at, axis, index)]
    checks = unproved(operands, {1: _replaced(x.shape, axis, indices.shape[axis])})
    return Nest((out.buffer,), k.body(), checks=checks)


def _gather_numpy(x: Any, indices: Any, axis: int) -> Any:
    return np.take_along_axis(x, indices.astype(np.int64), axis)


# out[..., i, ...] = x[..., indices[..., i, ...], ...]
GATHER = define("gather", "x, indices", _gather_type, _gather_numpy, _gather_nest, {"axis": REQUIRED}, indices={"indices": clamped(ALONG)})


# --- scatter -----------------------------------------------------------------------------------------------------------


def _scatter_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x, indices, updates = (tensor_operand(args, i, name) for i, name in enumerate(("x", "indices", "updates")))
    same_dtype([x, updates])
    _along(x, indices, attrs)
    if updates.ndim is not None and indices.ndim is not None and updates.ndim != indices.ndim:
        raise AnnotationError(f"updates have rank {updates.ndim}, expected {indices.ndim}, the rank of the indices")
    if updates.shape is not None and indices.shape is not None:
        for i, (wanted, given) in enumerate(zip(indices.shape, updates.shape, strict=True)):
            agree(wanted, given, f"dimension {i} of the updates")
    return x


def _write_updates(k: Kernel, operands: Operands, out: Array) -> Checks:
    """Write the updates in row-major order, so that the last of several updates at one index wins. Return the run-time checks."""
    x, indices, updates = k.arrays(*(operands.buffer(i) for i in range(3)))
    axis = axis_attr(operands.attrs, len(x.shape))
    extent = x.shape[axis]
    with k.nest(indices.shape) as at, k.when(inside(indices[at], extent)):
        index = clamped_index(k, "index", indices[at], extent)
        out[_replaced(at, axis, index)] = updates[at]
    wanted = _replaced(x.shape, axis, indices.shape[axis])
    return unproved(operands, {1: wanted, 2: wanted})


def _scatter_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    with k.nest(out.shape) as at:
        out[at] = x[at]
    checks = _write_updates(k, operands, out)
    return Nest((out.buffer,), k.body(), checks=checks)


def _scatter_inplace_nest(operands: Operands) -> Nest:
    k = Kernel()
    out = k.array(output(operands))
    checks = _write_updates(k, operands, out)
    return Nest((out.buffer,), k.body(), inplace=(0,), checks=checks)


def _scatter_numpy(x: Any, indices: Any, updates: Any, axis: int) -> Any:
    out = x.copy()
    places = [np.broadcast_to(p, indices.shape) for p in np.ogrid[tuple(slice(n) for n in indices.shape)]]
    places[axis % x.ndim] = indices
    inside = (indices >= 0) & (indices < x.shape[axis])
    out[tuple(p[inside] for p in places)] = updates[inside]
    return out


# out = x, except that out[..., indices[..., i, ...], ...] = updates[..., i, ...].
SCATTER = define(
    "scatter",
    "x, indices, updates",
    _scatter_type,
    _scatter_numpy,
    _scatter_nest,
    {"axis": REQUIRED},
    indices={"indices": skipped(ALONG)},
)

# Like scatter, but writes to the memory of x. If x is read later, the pass `protect_operands` copies x first.
SCATTER_INPLACE = define(
    "scatter_inplace",
    "x, indices, updates",
    _scatter_type,
    _scatter_numpy,
    _scatter_inplace_nest,
    {"axis": REQUIRED},
    pure=False,
    indices={"indices": skipped(ALONG)},
)
