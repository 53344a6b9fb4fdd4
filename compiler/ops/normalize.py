"""Normalisation along the last axis: softmax, log-softmax, layer norm, RMS norm. Statistics are computed in f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, exp, index, largest, log, rsqrt, total
from compiler.ir.op import REQUIRED
from compiler.ir.types import Type
from compiler.ops.broadcast import output
from compiler.ops.operands import agree, float_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32


def _like_first(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    """Return the annotation of x. The other operands must be vectors as long as a row of x."""
    x = wants_float(tensor_operand(args, 0, "x"), "x")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, expected at least one axis")
    for i in range(1, len(args)):
        weight = wants_float(tensor_operand(args, i, f"operand {i}", ndim=1), f"operand {i}")
        if x.shape is not None and weight.shape is not None:
            agree(x.shape[-1], weight.shape[0], f"the length of operand {i}")
    return x


def _norm(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    for name in attrs:
        float_attr(attrs, name)
    return _like_first(args, attrs)


def _sum(x: Array, row: Sequence[Dim], term: Callable[[Scalar], Scalar] = lambda v: v) -> Scalar:
    """Return the sum of `term(element)` over the row of `x` at the index `row`."""
    return total((x.shape[-1],), lambda r: term(cast(x[*row, r], F32)))


def _weighted(operands: Operands) -> tuple[tuple[int, Type], ...]:
    """Return the run-time checks of the operands after x. Each of these operands must be as long as a row of x; unless this is proved, the
    operand gets a check."""
    return unproved(operands, {i: operands.buffer(0).shape[-1:] for i in range(1, len(operands.places))})


# --- softmax -----------------------------------------------------------------------------------------------------------


def _softmax_nest(operands: Operands) -> Nest:
    """Compute the softmax with one division per row instead of one per element. In a row with a finite maximum, the reciprocal cannot
    overflow, since the sum includes the term exp(0) = 1."""
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    *rows, length = x.shape
    top, scale = k.workspace("top", *rows), k.workspace("scale", *rows)
    with k.nest(rows) as row:
        top[row] = largest((length,), lambda r: cast(x[*row, r], F32))
    with k.nest(rows) as row:
        scale[row] = 1.0 / _sum(x, row, lambda v: exp(v - top[row]))
    with k.nest(out.shape) as (*row, j):
        out[*row, j] = cast(exp(cast(x[*row, j], F32) - top[*row]) * scale[*row], out.dtype)
    return Nest((out.buffer,), k.body())


def _softmax_numpy(x: Any) -> Any:
    wide = x.astype(np.float32)
    e = np.exp(wide - wide.max(-1, keepdims=True, initial=-np.inf))
    return (e * (1 / e.sum(-1, keepdims=True))).astype(x.dtype)


def _log_softmax_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    *rows, length = x.shape
    top, log_sum = k.workspace("top", *rows), k.workspace("total", *rows)
    with k.nest(rows) as row:
        top[row] = largest((length,), lambda r: cast(x[*row, r], F32))
    with k.nest(rows) as row:
        log_sum[row] = log(_sum(x, row, lambda v: exp(v - top[row])))
    with k.nest(out.shape) as (*row, j):
        out[*row, j] = cast(cast(x[*row, j], F32) - top[*row] - log_sum[*row], out.dtype)
    return Nest((out.buffer,), k.body())


def _log_softmax_numpy(x: Any) -> Any:
    wide = x.astype(np.float32)
    shifted = wide - wide.max(-1, keepdims=True, initial=-np.inf)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(x.dtype)


SOFTMAX = define("softmax", "x", _like_first, _softmax_numpy, _softmax_nest)
LOG_SOFTMAX = define("log_softmax", "x", _like_first, _log_softmax_numpy, _log_softmax_nest)


# --- norms -------------------------------------------------------------------------------------------------------------


def _mean(x: Array, row: Sequence[Dim], term: Callable[[Scalar], Scalar] = lambda v: v) -> Scalar:
    return _sum(x, row, term) / cast(index(x.shape[-1]), F32)


def _numpy_mean(x: Any) -> Any:
    """Return the mean of each row. Unlike np.mean, do not warn about rows without elements."""
    return x.sum(-1, keepdims=True) / np.float32(x.shape[-1])


def _rms_nest(operands: Operands) -> Nest:
    """out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)"""
    k, offset = Kernel(), operands.attrs["weight_offset"]
    out, x, w = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    scale = k.workspace("scale", *x.shape[:-1])
    with k.nest(scale.shape) as row:
        scale[row] = rsqrt(_mean(x, row, lambda v: v * v) + operands.attrs["eps"])
    with k.nest(out.shape) as (*row, j):
        weight = cast(w[j], F32) + offset if offset else cast(w[j], F32)
        out[*row, j] = cast(cast(x[*row, j], F32) * scale[*row] * weight, out.dtype)
    return Nest((out.buffer,), k.body(), checks=_weighted(operands))


def _rms_numpy(x: Any, w: Any, *, eps: float, weight_offset: float) -> Any:
    wide = x.astype(np.float32)
    scale = 1 / np.sqrt(_numpy_mean(wide * wide) + np.float32(eps))
    return (wide * scale * (w.astype(np.float32) + np.float32(weight_offset))).astype(x.dtype)


RMS_NORM = define("rms_norm", "x, weight", _norm, _rms_numpy, _rms_nest, {"eps": REQUIRED, "weight_offset": 0.0})


def _layer_nest(operands: Operands) -> Nest:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias"""
    k = Kernel()
    out, x, w = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    bias = k.array(operands.buffer(2)) if operands.has(2) else None
    mean, scale = (k.workspace(name, *x.shape[:-1]) for name in ("mean", "scale"))
    with k.nest(mean.shape) as row:
        mean[row] = _mean(x, row)
    with k.nest(scale.shape) as row:
        variance = _mean(x, row, lambda v: (v - mean[row]) * (v - mean[row]))
        scale[row] = rsqrt(variance + operands.attrs["eps"])
    with k.nest(out.shape) as (*row, j):
        weighted = (cast(x[*row, j], F32) - mean[*row]) * scale[*row] * cast(w[j], F32)
        out[*row, j] = cast(weighted if bias is None else weighted + cast(bias[j], F32), out.dtype)
    return Nest((out.buffer,), k.body(), checks=_weighted(operands))


def _layer_numpy(x: Any, w: Any, bias: Any = None, *, eps: float) -> Any:
    wide = x.astype(np.float32)
    centred = wide - _numpy_mean(wide)
    scale = 1 / np.sqrt(_numpy_mean(centred * centred) + np.float32(eps))
    weighted = centred * scale * w.astype(np.float32)
    return (weighted if bias is None else weighted + bias.astype(np.float32)).astype(x.dtype)


LAYER_NORM = define("layer_norm", "x, weight, bias?", _norm, _layer_numpy, _layer_nest, {"eps": REQUIRED})
