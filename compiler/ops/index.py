"""Elements picked and placed by indices that are data.

Reading clamps an index into its axis, so that a bad one never reads foreign memory, and an axis without elements is refused; writing
skips it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Fn, Stmt, When
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_eq
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import output
from compiler.ops.nest import apply, cast, clamped, const, fill, index_value, let, load, loops, seq, store
from compiler.ops.operands import agree, axis_attr, num_elements, same_dtype, tensor_operand, unproved, wants_int
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]
Checks = tuple[tuple[int, Type], ...]


def _replaced(ijk: tuple[Dim, ...], axis: int, index: Dim) -> tuple[Dim, ...]:
    return (*ijk[:axis], index, *ijk[axis + 1 :])


def something_to_read(extent: Dim, indices: Sequence[Dim]) -> tuple[tuple[Dim, Dim], ...]:
    """An axis without elements has no place to clamp an index to; where there are no indices, none is needed."""
    wanted = dim_max(extent, dim_min(num_elements(indices), 1))
    return () if prove_eq(wanted, extent) else ((wanted, extent),)


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
    out, x, indices = output(operands), operands.buffer(0), operands.buffer(1)
    axis, count = axis_attr(operands.attrs, len(x.shape)), len(indices.shape)
    extent = x.shape[axis]

    def outer(*ijk: Dim) -> Stmt:
        before, at = ijk[:axis], ijk[axis:]

        def inner(index: Dim) -> Stmt:
            rest = x.shape[axis + 1 :]
            return loops(rest, lambda *after: store(out, (*ijk, *after), load(x, *before, index, *after)))

        return let("index", clamped(load(indices, *at), extent), inner, 0, extent - 1)

    return Nest((out,), loops(out.shape[: axis + count], outer), equal=something_to_read(extent, indices.shape))


def _take_numpy(x: Any, indices: Any, axis: int) -> Any:
    if indices.size and not x.shape[axis]:
        raise IndexError(f"axis {axis} has no elements, and {indices.size} indices read there")
    return np.take(x, indices, axis, mode="clip")


# x[..., indices, ...] along the axis.
TAKE = define("take", "x, indices", _take_type, _take_numpy, _take_nest, {"axis": REQUIRED})


# --- gather: element by element ----------------------------------------------------------------------------------------


def _along(x: TensorType, indices: TensorType, attrs: Attrs) -> int | None:
    """The axis, once the ranks are known to agree and the extents of the other axes not to differ."""
    wants_int(indices, "indices")
    if x.ndim is not None and indices.ndim is not None and x.ndim != indices.ndim:
        raise AnnotationError(f"indices have rank {indices.ndim}, wants {x.ndim}, that of x")
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
    out, x, indices = output(operands), operands.buffer(0), operands.buffer(1)
    axis = axis_attr(operands.attrs, len(x.shape))
    extent = x.shape[axis]

    def element(*ijk: Dim) -> Stmt:
        def picked(index: Dim) -> Stmt:
            return store(out, ijk, load(x, *_replaced(ijk, axis, index)))

        return let("index", clamped(load(indices, *ijk), extent), picked, 0, extent - 1)

    checks = unproved(operands, {1: _replaced(x.shape, axis, indices.shape[axis])})
    return Nest((out,), loops(out.shape, element), checks=checks, equal=something_to_read(extent, indices.shape))


def _gather_numpy(x: Any, indices: Any, axis: int) -> Any:
    return np.take_along_axis(x, np.clip(indices.astype(np.int64), 0, x.shape[axis] - 1), axis)


# out[..., i, ...] = x[..., indices[..., i, ...], ...]
GATHER = define("gather", "x, indices", _gather_type, _gather_numpy, _gather_nest, {"axis": REQUIRED})


# --- scatter -----------------------------------------------------------------------------------------------------------


def _scatter_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x, indices, updates = (tensor_operand(args, i, name) for i, name in enumerate(("x", "indices", "updates")))
    same_dtype([x, updates])
    _along(x, indices, attrs)
    if updates.ndim is not None and indices.ndim is not None and updates.ndim != indices.ndim:
        raise AnnotationError(f"updates have rank {updates.ndim}, wants {indices.ndim}, that of the indices")
    if updates.shape is not None and indices.shape is not None:
        for i, (wanted, given) in enumerate(zip(indices.shape, updates.shape, strict=True)):
            agree(wanted, given, f"dimension {i} of the updates")
    return x


def _writes(operands: Operands, out: Buffer) -> tuple[Stmt, Checks]:
    """Element by element in row-major order: of several for one place the last stays."""
    x, indices, updates = (operands.buffer(i) for i in range(3))
    axis = axis_attr(operands.attrs, len(x.shape))
    extent = x.shape[axis]

    def element(*ijk: Dim) -> Stmt:
        given = cast(load(indices, *ijk), DType.I64)
        inside = apply(Fn.AND, apply(Fn.LE, const(0, DType.I64), given), apply(Fn.LT, given, index_value(extent)))
        write = let(
            "index", clamped(given, extent), lambda index: store(out, _replaced(ijk, axis, index), load(updates, *ijk)), 0, extent - 1
        )
        return When(inside, write)

    wanted = _replaced(x.shape, axis, indices.shape[axis])
    return loops(indices.shape, element), unproved(operands, {1: wanted, 2: wanted})


def _scatter_nest(operands: Operands) -> Nest:
    out, x = output(operands), operands.buffer(0)
    writes, checks = _writes(operands, out)
    return Nest((out,), seq(fill(out, lambda *ijk: load(x, *ijk)), writes), checks=checks)


def _scatter_inplace_nest(operands: Operands) -> Nest:
    out = output(operands)
    writes, checks = _writes(operands, out)
    return Nest((out,), writes, inplace=(0,), checks=checks)


def _scatter_numpy(x: Any, indices: Any, updates: Any, axis: int) -> Any:
    out = x.copy()
    places = [np.broadcast_to(p, indices.shape) for p in np.ogrid[tuple(slice(n) for n in indices.shape)]]
    places[axis % x.ndim] = indices
    inside = (indices >= 0) & (indices < x.shape[axis])
    out[tuple(p[inside] for p in places)] = updates[inside]
    return out


# x with x[..., indices[..., i, ...], ...] = updates[..., i, ...]
SCATTER = define("scatter", "x, indices, updates", _scatter_type, _scatter_numpy, _scatter_nest, {"axis": REQUIRED})

# The same in the memory of x, which nothing may use afterwards.
SCATTER_INPLACE = define(
    "scatter_inplace", "x, indices, updates", _scatter_type, _scatter_numpy, _scatter_inplace_nest, {"axis": REQUIRED}, pure=False
)
