"""Operators that move elements without arithmetic: views, permutations, slices, splits and concatenation.

Reshape, expand_dims and squeeze have no loop nest: their result is a view of the operand's memory under another shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar, dtype_of
from compiler.ir.loops.write import Kernel, const, guard
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_eq, prove_lt
from compiler.ir.types import ShapeType, TensorType, TupleType, Type
from compiler.ops.broadcast import ONE, agree_stretched, broadcast_fits, element, output, sized_buffer
from compiler.ops.operands import (
    agree,
    axes_attr,
    axis_attr,
    dim_attr,
    dims_attr,
    int_attr,
    num_elements,
    same_dtype,
    shape_operand,
    tensor_operand,
    unproved,
)
from compiler.ops.tables import Nest, Operands, View, define

Attrs = Mapping[str, Any]


def _of_shape(x: TensorType, shape: ShapeType) -> TensorType:
    return TensorType(shape.dims, x.dtype, shape.ndim)


def wanted_shape(args: Sequence[Type], index: int) -> ShapeType:
    """Return operand `index`, the shape of the result. Raise AnnotationError if it is no shape, or an extent is proved negative."""
    shape = shape_operand(args, index, "shape")
    for i, d in enumerate(shape.dims or ()):
        if prove_lt(d, 0):
            raise AnnotationError(f"dimension {i} of the shape is {d}, expected at least 0; compute inferred dimensions beforehand")
    return shape


# --- views -------------------------------------------------------------------------------------------------------------


def _reshape_type(args: tuple[Type, ...], _: Attrs) -> Type:
    x, shape = tensor_operand(args, 0, "x"), wanted_shape(args, 1)
    if x.shape is not None and shape.dims is not None:
        agree(num_elements(shape.dims), num_elements(x.shape), "the number of elements")
    return _of_shape(x, shape)


def _reshape_view(operands: Operands) -> View:
    given, wanted = num_elements(operands.buffer(0).shape), num_elements(output(operands).shape)
    return View(() if prove_eq(given, wanted) else ((wanted, given),))


RESHAPE = define("reshape", "x, shape", _reshape_type, lambda x, shape: x.reshape(shape), _reshape_view, view=True)


def _expand_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    if x.ndim is None:
        return x
    count = len(attrs["axes"]) if isinstance(attrs["axes"], list | tuple) else 1
    axes = axes_attr(attrs, x.ndim + count)
    if x.shape is None:
        return TensorType(None, x.dtype, x.ndim + count)
    rest = iter(x.shape)
    return TensorType(tuple(ONE if i in axes else next(rest) for i in range(x.ndim + count)), x.dtype)


EXPAND_DIMS = define(
    "expand_dims", "x", _expand_type, lambda x, axes: np.expand_dims(x, axes), lambda _: View(), {"axes": REQUIRED}, view=True
)


def _squeeze_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    if x.ndim is None:
        return x
    axes = axes_attr(attrs, x.ndim)
    if x.shape is None:
        return TensorType(None, x.dtype, x.ndim - len(axes))
    for i in axes:
        agree(ONE, x.shape[i], f"dimension {i}")
    return TensorType(tuple(d for i, d in enumerate(x.shape) if i not in axes), x.dtype)


def _squeeze_view(operands: Operands) -> View:
    shape = operands.buffer(0).shape
    return View(tuple((ONE, shape[i]) for i in axes_attr(operands.attrs, len(shape)) if not prove_eq(shape[i], 1)))


SQUEEZE = define("squeeze", "x", _squeeze_type, lambda x, axes: np.squeeze(x, axes), _squeeze_view, {"axes": REQUIRED}, view=True)


# --- broadcasting and permutations -----------------------------------------------------------------------------------------


def _broadcast_type(args: tuple[Type, ...], _: Attrs) -> Type:
    x, shape = tensor_operand(args, 0, "x"), wanted_shape(args, 1)
    if x.ndim is not None and shape.ndim is not None and x.ndim > shape.ndim:
        raise AnnotationError(f"x has rank {x.ndim}, expected at most {shape.ndim}, the rank of the shape")
    if x.shape is not None and shape.dims is not None:
        agree_stretched(x.shape, shape.dims)
    return _of_shape(x, shape)


def _broadcast_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.array(output(operands)), operands.buffer(0)
    with k.nest(out.shape) as at:
        out[at] = element(x, at, x.dtype, out.shape)
    return Nest((out.buffer,), k.body(), fits=broadcast_fits(operands, out.shape))


BROADCAST_TO = define("broadcast_to", "x, shape", _broadcast_type, lambda x, shape: np.array(np.broadcast_to(x, shape)), _broadcast_nest)


def _permutation(attrs: Attrs, ndim: int) -> tuple[int, ...]:
    axes = tuple(reversed(range(ndim))) if attrs["axes"] is None else axes_attr(attrs, ndim)
    if len(axes) != ndim:
        raise AnnotationError(f"attribute axes names {len(axes)} axes, expected all {ndim}")
    return axes


def _permute_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    if x.ndim is None:
        return x
    axes = _permutation(attrs, x.ndim)
    return x if x.shape is None else TensorType(tuple(x.shape[i] for i in axes), x.dtype)


def _permute_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    axes = _permutation(operands.attrs, len(x.shape))
    with k.nest(out.shape) as at:
        out[at] = x[tuple(at[axes.index(i)] for i in range(len(axes)))]
    return Nest((out.buffer,), k.body())


PERMUTE_DIMS = define(
    "permute_dims", "x", _permute_type, lambda x, axes: np.array(np.transpose(x, axes), order="C"), _permute_nest, {"axes": None}
)


def _flip_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    if x.ndim is not None:
        axes_attr(attrs, x.ndim)
    return x


def _flip_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    axes = axes_attr(operands.attrs, len(x.shape))
    with k.nest(out.shape) as at:
        out[at] = x[tuple(x.shape[i] - 1 - d if i in axes else d for i, d in enumerate(at))]
    return Nest((out.buffer,), k.body())


FLIP = define("flip", "x", _flip_type, lambda x, axes: np.array(np.flip(x, axes), order="C"), _flip_nest, {"axes": REQUIRED})


# --- slices and splits -------------------------------------------------------------------------------------------------


def _span(attrs: Attrs, extent: Dim) -> tuple[Dim, Dim]:
    """Return the begin of a slice of an axis with this extent, clamped into the axis, and the number of elements of the slice."""
    begin = dim_min(dim_max(dim_attr(attrs, "begin"), 0), extent)
    end = extent if attrs["end"] is None else dim_min(dim_attr(attrs, "end"), extent)
    return begin, ceil_div(dim_max(end - begin, 0), int_attr(attrs, "stride", 1))


def _slice_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    for name in ("begin", "end"):
        if attrs[name] is not None:
            dim_attr(attrs, name)
        if isinstance(attrs[name], int) and attrs[name] < 0:  # a symbolic number is clamped
            raise AnnotationError(
                f"attribute {name} is {attrs[name]}, expected at least 0; to count from the end, subtract from the extent"
            )
    if x.ndim is None or x.shape is None:
        return x
    axis = axis_attr(attrs, x.ndim)
    _, length = _span(attrs, x.shape[axis])
    return TensorType((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)


def _slice_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    axis = axis_attr(operands.attrs, len(x.shape))
    begin, _ = _span(operands.attrs, x.shape[axis])
    stride = int_attr(operands.attrs, "stride", 1)
    with k.nest(out.shape) as at:
        out[at] = x[*at[:axis], begin + at[axis] * stride, *at[axis + 1 :]]
    return Nest((out.buffer,), k.body())


def _slice_numpy(x: Any, axis: int, begin: int, end: int | None, stride: int) -> Any:
    place = slice(max(begin, 0), None if end is None else max(end, 0), stride)
    return np.ascontiguousarray(x[(*[slice(None)] * (axis % x.ndim), place)])


# Slice one axis from `begin` to `end` (None: the end of the axis). Both `begin` and `end` may be symbolic, and are clamped into the axis; a
# negative constant raises AnnotationError. The result has every `stride`-th element.
SLICE = define("slice", "x", _slice_type, _slice_numpy, _slice_nest, {"axis": REQUIRED, "begin": 0, "end": None, "stride": 1})


def _split_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    sizes = dims_attr(attrs, "sizes")
    if not sizes:
        raise AnnotationError("attribute sizes is empty, expected the extent of each part")
    if x.shape is None:
        return TupleType((TensorType(None, x.dtype, x.ndim),) * len(sizes))
    axis = axis_attr(attrs, len(x.shape))
    agree(x.shape[axis], sum(sizes, Dim.of(0)), "the sum of the sizes")
    return TupleType(tuple(TensorType((*x.shape[:axis], s, *x.shape[axis + 1 :]), x.dtype) for s in sizes))


def _split_nest(operands: Operands) -> Nest:
    k, out = Kernel(), operands.out
    assert isinstance(out, TupleType)
    x = k.array(operands.buffer(0))
    axis = axis_attr(operands.attrs, len(x.shape))
    parts = tuple(sized_buffer(type_, f"part{n}") for n, type_ in enumerate(out.fields))
    begin = Dim.of(0)
    for part in k.arrays(*parts):
        with k.nest(part.shape) as at:
            part[at] = x[*at[:axis], begin + at[axis], *at[axis + 1 :]]
        begin = begin + part.shape[axis]
    wanted = (*x.shape[:axis], begin, *x.shape[axis + 1 :])
    return Nest(parts, k.body(), checks=unproved(operands, {0: wanted}))


def _split_numpy(x: Any, axis: int, sizes: Sequence[int]) -> Any:
    return tuple(np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis))


SPLIT = define("split", "x", _split_type, _split_numpy, _split_nest, {"axis": REQUIRED, "sizes": REQUIRED})


# --- concatenation -----------------------------------------------------------------------------------------------------


def concat_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    xs = [tensor_operand(args, i, f"operand {i}") for i in range(len(args))]
    dtype, ndim = same_dtype(xs), _same_rank(xs)
    if ndim is None:
        return TensorType(None, dtype)
    axis = axis_attr(attrs, ndim)
    shapes = [x.shape for x in xs if x.shape is not None]
    for i, shape in enumerate(shapes):
        for d in range(ndim):
            if d != axis:
                agree(shapes[0][d], shape[d], f"dimension {d} of operand {i}")
    if len(shapes) < len(xs):
        return TensorType(None, dtype, ndim)
    total = sum((shape[axis] for shape in shapes), Dim.of(0))
    return TensorType((*shapes[0][:axis], total, *shapes[0][axis + 1 :]), dtype)


def concat_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, *xs = k.arrays(output(operands), *(operands.buffer(i) for i in range(len(operands.places))))
    axis = axis_attr(operands.attrs, len(out.shape))
    with k.nest(out.shape) as at:
        parts, begin = list[tuple[Dim, Scalar]](), Dim.of(0)
        for x in xs:
            parts.append((begin, x[*at[:axis], at[axis] - begin, *at[axis + 1 :]]))
            begin = begin + x.shape[axis]
        out[at] = part_at(at[axis], parts, begin)
    wanted = {i: (*xs[0].shape[:axis], x.shape[axis], *xs[0].shape[axis + 1 :]) for i, x in enumerate(xs)}
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


def part_at(index: Dim, parts: Sequence[tuple[Dim, Scalar]], end: Dim) -> Scalar:
    """Return the element at `index` of concatenated parts, or 0 if the index is outside them. `parts` has a pair for each part: the index
    at which the part begins, and its element at `index`. `end` is the index after the last part."""
    value: Scalar = const(0, dtype_of(parts[0][1]))
    for begin, part in reversed(parts):
        value, end = guard(begin, index, end, part, value), begin
    return value


def _same_rank(xs: Sequence[TensorType]) -> int | None:
    ranks = dict.fromkeys(x.ndim for x in xs if x.ndim is not None)
    if len(ranks) > 1:
        raise AnnotationError(f"operands have ranks {', '.join(map(str, ranks))}, expected the same rank")
    return next(iter(ranks), None)


CONCAT = define("concat", "*xs", concat_type, lambda *xs, axis: np.concatenate(xs, axis), concat_nest, {"axis": REQUIRED})
