"""Reductions along axes, cumulative sums, sorting and top-k.

Reductions accumulate floats smaller than f32 in f32, and round the result once; a cumulative sum is rounded to the element type at every
element. A reduction of no elements gives the identity of its function; the mean of no elements is NaN. argmax and argmin need at least one
element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Kernel, cast, fold, guard, index
from compiler.ir.op import REQUIRED, OpDef
from compiler.ir.relations import Relation, at_least, at_most
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import ONE, output
from compiler.ops.operands import axes_attr, axis_attr, bool_attr, dim_attr, num_elements, tensor_operand, wants_float
from compiler.ops.tables import Library, Nest, Operands, define
from runtime.library import routine

Attrs = Mapping[str, Any]


# --- reductions --------------------------------------------------------------------------------------------------------


def _axes(attrs: Attrs, ndim: int) -> tuple[int, ...]:
    """Return the axes that the attribute `axes` names; None means all axes."""
    return tuple(range(ndim)) if attrs["axes"] is None else axes_attr(attrs, ndim)


def _folded(x: TensorType, axes: tuple[int, ...], keepdims: bool, dtype: DType | None) -> TensorType:
    """Return the annotation of a reduction of x along these axes. With `keepdims`, they stay as axes of extent 1."""
    assert x.ndim is not None
    if x.shape is None:
        return TensorType(None, dtype, x.ndim if keepdims else x.ndim - len(axes))
    kept = [ONE if i in axes else d for i, d in enumerate(x.shape) if keepdims or i not in axes]
    return TensorType(tuple(kept), dtype)


def _fold_type(wants: Callable[[TensorType], None]) -> Callable[..., Type]:
    def deduce(args: tuple[Type, ...], attrs: Attrs) -> Type:
        x = tensor_operand(args, 0, "x")
        wants(x)
        keepdims = bool_attr(attrs, "keepdims")
        return TensorType(None, x.dtype) if x.ndim is None else _folded(x, _axes(attrs, x.ndim), keepdims, x.dtype)

    return deduce


def _numbers(x: TensorType) -> None:
    if x.dtype is DType.BOOL:
        raise AnnotationError("x holds bool, expected numbers; cast it first")


def _floats(x: TensorType) -> None:
    wants_float(x, "x")


def _bools(x: TensorType) -> None:
    if x.dtype not in (None, DType.BOOL):
        raise AnnotationError(f"x holds {x.dtype}, expected bool; compare it first")


def _fold_at(at: tuple[Dim, ...], operands: Operands, axes: tuple[int, ...], fn: ReduceFn, wide: DType) -> Scalar:
    """Return the element of the result at index `at`: the reduction of the first operand along the axes."""
    x, keepdims = operands.buffer(0), operands.attrs["keepdims"]

    def term(*rs: Dim) -> Scalar:
        kept = iter(i for axis, i in enumerate(at) if not (keepdims and axis in axes))
        folded = dict(zip(axes, rs, strict=True))
        return cast(Load(x, tuple(folded[axis] if axis in folded else next(kept) for axis in range(len(x.shape)))), wide)

    return fold(fn, [x.shape[axis] for axis in axes], term) if axes else term()


def _fold(name: str, fn: ReduceFn, numpy: Callable[..., Any], wants: Callable[[TensorType], None]) -> OpDef:
    def nest(operands: Operands) -> Nest:
        k = Kernel()
        out, x = k.arrays(output(operands), operands.buffer(0))
        axes = tuple(sorted(_axes(operands.attrs, len(x.shape))))
        with k.nest(out.shape) as at:
            out[at] = cast(_fold_at(at, operands, axes, fn, x.dtype.accumulator), out.dtype)
        return Nest((out.buffer,), k.body())

    return define(name, "x", _fold_type(wants), numpy, nest, {"axes": None, "keepdims": False})


def _widely(numpy: Callable[..., Any]) -> Callable[..., Any]:
    def interpret(x: Any, axes: Any, keepdims: bool) -> Any:
        wide = DType.from_numpy(x.dtype).accumulator.numpy
        return np.asarray(numpy(x.astype(wide), axis=axes, keepdims=keepdims)).astype(x.dtype)

    return interpret


def _extreme(numpy: Callable[..., Any], highest: bool) -> Callable[..., Any]:
    def interpret(x: Any, axes: Any, keepdims: bool) -> Any:
        wide = DType.from_numpy(x.dtype).accumulator
        least, most = wide.ends
        initial = wide.numpy.type(least if highest else most)  # an end of the wide type, since e4m3 has no infinity
        return np.asarray(numpy(x.astype(wide.numpy), axis=axes, keepdims=keepdims, initial=initial)).astype(x.dtype)

    return interpret


SUM = _fold("sum", ReduceFn.SUM, _widely(lambda x, axis, keepdims: np.sum(x, axis, x.dtype, keepdims=keepdims)), _numbers)
PROD = _fold("prod", ReduceFn.PROD, _widely(lambda x, axis, keepdims: np.prod(x, axis, x.dtype, keepdims=keepdims)), _numbers)
MAX = _fold("max", ReduceFn.MAX, _extreme(np.max, highest=True), _numbers)
MIN = _fold("min", ReduceFn.MIN, _extreme(np.min, highest=False), _numbers)
ANY = _fold("any", ReduceFn.ANY, lambda x, axes, keepdims: np.asarray(np.any(x, axes, keepdims=keepdims)), _bools)
ALL = _fold("all", ReduceFn.ALL, lambda x, axes, keepdims: np.asarray(np.all(x, axes, keepdims=keepdims)), _bools)


def _mean_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    axes, wide = tuple(sorted(_axes(operands.attrs, len(x.shape)))), x.dtype.accumulator
    count = cast(index(num_elements([x.shape[i] for i in axes])), wide)
    with k.nest(out.shape) as at:
        out[at] = cast(_fold_at(at, operands, axes, ReduceFn.SUM, wide) / count, out.dtype)
    return Nest((out.buffer,), k.body())


def _mean_numpy(x: Any, axes: Any, keepdims: bool) -> Any:
    total = np.asarray(np.sum(x.astype(np.float32), axis=axes, keepdims=keepdims))
    return (total / np.float32(x.size / total.size if total.size else 1)).astype(x.dtype)


MEAN = define("mean", "x", _fold_type(_floats), _mean_numpy, _mean_nest, {"axes": None, "keepdims": False})


# --- argmax and argmin -------------------------------------------------------------------------------------------------


def _place_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    _numbers(x)
    keepdims = bool_attr(attrs, "keepdims")
    if x.ndim is None:
        return TensorType(None, DType.I64)
    axis = axis_attr(attrs, x.ndim)
    return _folded(x, (axis,), keepdims, DType.I64)


def _some(args: tuple[Type, ...], attrs: Attrs) -> Iterable[Relation]:
    """Require at least one element along the axis: without elements there is no extreme whose index could be returned."""
    if isinstance(x := args[0], TensorType) and x.shape is not None:
        axis = axis_attr(attrs, len(x.shape))
        yield at_least(x.shape[axis], 1, f"dimension {axis}")


def _place(name: str, fn: ReduceFn, numpy: Callable[..., Any]) -> OpDef:
    """Define an operator that returns the index of an extreme (argmax or argmin). The first of equal elements wins, and a NaN counts as the
    extreme."""

    def nest(operands: Operands) -> Nest:
        k = Kernel()
        out, x = k.arrays(output(operands), operands.buffer(0))
        axes = (axis_attr(operands.attrs, len(x.shape)),)
        with k.nest(out.shape) as at:
            out[at] = _fold_at(at, operands, axes, fn, x.dtype)
        return Nest((out.buffer,), k.body())

    def interpret(x: Any, axis: int, keepdims: bool) -> Any:
        return np.asarray(numpy(x, axis=axis, keepdims=keepdims)).astype(np.int64)

    return define(name, "x", _place_type, interpret, nest, {"axis": REQUIRED, "keepdims": False}, relations=_some)


ARGMAX = _place("argmax", ReduceFn.ARGMAX, np.argmax)
ARGMIN = _place("argmin", ReduceFn.ARGMIN, np.argmin)


# --- cumulative sums ---------------------------------------------------------------------------------------------------


def _cumsum_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x = tensor_operand(args, 0, "x")
    _numbers(x)
    if x.ndim is not None:
        axis_attr(attrs, x.ndim)
    return x


def _cumsum_nest(operands: Operands) -> Nest:
    """Add each element to the sum of the elements before it, in order and in the element type."""
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    axis = axis_attr(operands.attrs, len(x.shape))
    with k.nest(out.shape) as at:
        before = out[*at[:axis], at[axis] - 1, *at[axis + 1 :]]
        out[at] = guard(1, at[axis], x.shape[axis], before + x[at], x[at])
    return Nest((out.buffer,), k.body())


CUMSUM = define(
    "cumsum", "x", _cumsum_type, lambda x, axis: np.add.accumulate(x, axis=axis, dtype=x.dtype), _cumsum_nest, {"axis": REQUIRED}
)


# --- sorting and top-k: host routines ----------------------------------------------------------------------------------


def _ordered(result: Callable[[TensorType], Type]) -> Callable[..., Type]:
    def deduce(args: tuple[Type, ...], attrs: Attrs) -> Type:
        x = tensor_operand(args, 0, "x")
        bool_attr(attrs, "descending")
        if x.ndim is not None:
            axis_attr(attrs, x.ndim)
        return result(x)

    return deduce


def _places(x: TensorType) -> TensorType:
    return TensorType(x.shape, DType.I64, x.ndim)


def _sort_numpy(name: str) -> Callable[..., Any]:
    return lambda x, axis, descending: routine(name).compute(x, axis, descending)[0]


def _routine(name: str) -> Callable[[Operands], Library]:
    return lambda operands: Library(name, dict(operands.attrs))


_ORDER = {"axis": -1, "descending": False}

# Sorting is stable, and a NaN counts as the largest element.
SORT = define("sort", "x", _ordered(lambda x: x), _sort_numpy("sort"), _routine("sort"), _ORDER)
ARGSORT = define("argsort", "x", _ordered(_places), _sort_numpy("argsort"), _routine("argsort"), _ORDER)


def _topk_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results, values and indices. Values are in descending order if `largest` is true, else in ascending
    order; indices are in the order of the values."""
    x = tensor_operand(args, 0, "x")
    bool_attr(attrs, "largest")
    k = dim_attr(attrs, "k")
    if x.ndim is None:
        return TupleType((x, _places(x)))
    axis = axis_attr(attrs, x.ndim)
    if x.shape is None:
        return TupleType((x, _places(x)))
    values = TensorType((*x.shape[:axis], k, *x.shape[axis + 1 :]), x.dtype)
    return TupleType((values, _places(values)))


def _topk_relations(args: tuple[Type, ...], attrs: Attrs) -> Iterable[Relation]:
    k = dim_attr(attrs, "k")
    yield at_least(k, 0, "attribute k")
    if isinstance(x := args[0], TensorType) and x.shape is not None:
        axis = axis_attr(attrs, len(x.shape))
        yield at_most(k, x.shape[axis], "attribute k", f"the extent of dimension {axis}")


def _topk_numpy(x: Any, k: int, axis: int, largest: bool) -> Any:
    return routine("topk").compute(x, k, axis, largest)


TOP_K = define(
    "top_k", "x", _topk_type, _topk_numpy, _routine("topk"), {"k": REQUIRED, "axis": -1, "largest": True}, relations=_topk_relations
)
