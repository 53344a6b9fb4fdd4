"""Normalisation along the last axis: softmax, log-softmax, layer norm, RMS norm. Statistics are computed in f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Fn, ReduceFn, Scalar, Stmt
from compiler.ir.op import REQUIRED
from compiler.ir.types import Type
from compiler.ops.broadcast import output
from compiler.ops.nest import apply, cast, const, fill, index_value, load, reduce, seq
from compiler.ops.operands import agree, float_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32


def _like_first(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    """The annotation of x; weights are vectors as long as its rows."""
    x = wants_float(tensor_operand(args, 0, "x"), "x")
    if x.ndim == 0:
        raise AnnotationError("x has rank 0, wants at least one axis")
    for i in range(1, len(args)):
        weight = wants_float(tensor_operand(args, i, f"operand {i}", ndim=1), f"operand {i}")
        if x.shape is not None and weight.shape is not None:
            agree(x.shape[-1], weight.shape[0], f"the length of operand {i}")
    return x


def _norm(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    for name in attrs:
        float_attr(attrs, name)
    return _like_first(args, attrs)


def _row(x: Buffer) -> tuple[Dim, ...]:
    return x.shape[:-1]


def _stat(name: str, x: Buffer) -> Buffer:
    """One number per row."""
    return Buffer(name, _row(x), F32)


def _fold(fn: ReduceFn, x: Buffer, row: tuple[Dim, ...], term: Callable[[Scalar], Scalar]) -> Scalar:
    return reduce(fn, (x.shape[-1],), lambda r: term(cast(load(x, *row, r), F32)))


def _weighted(operands: Operands) -> tuple[tuple[int, Type], ...]:
    """Weights are as long as a row."""
    return unproved(operands, {i: operands.buffer(0).shape[-1:] for i in range(1, len(operands.places))})


def _program(temporaries: list[Buffer], *stages: Stmt) -> Stmt:
    body = seq(*stages)
    for buffer in reversed(temporaries):
        body = Allocate(buffer, body)
    return body


# --- softmax -----------------------------------------------------------------------------------------------------------


def _softmax_nest(operands: Operands) -> Nest:
    out, x = output(operands), operands.buffer(0)
    top, scale = _stat("top", x), _stat("scale", x)

    def shifted(value: Scalar, *row: Dim) -> Scalar:
        return apply(Fn.EXP, apply(Fn.SUB, value, load(top, *row)))

    def inverse(*row: Dim) -> Scalar:
        """A division per row instead of one per element; the sum holds a 1, so neither can overflow."""
        return apply(Fn.DIV, const(1.0, F32), _fold(ReduceFn.SUM, x, row, lambda v: shifted(v, *row)))

    def value(*ijk: Dim) -> Scalar:
        row = ijk[:-1]
        return cast(apply(Fn.MUL, shifted(cast(load(x, *ijk), F32), *row), load(scale, *row)), out.dtype)

    maximum = fill(top, lambda *row: _fold(ReduceFn.MAX, x, row, lambda v: v))
    return Nest((out,), _program([top, scale], maximum, fill(scale, inverse), fill(out, value)))


def _softmax_numpy(x: Any) -> Any:
    wide = x.astype(np.float32)
    e = np.exp(wide - wide.max(-1, keepdims=True, initial=-np.inf))
    return (e * (1 / e.sum(-1, keepdims=True))).astype(x.dtype)


def _log_softmax_nest(operands: Operands) -> Nest:
    out, x = output(operands), operands.buffer(0)
    top, total = _stat("top", x), _stat("total", x)
    return Nest(
        (out,),
        _program(
            [top, total],
            fill(top, lambda *row: _fold(ReduceFn.MAX, x, row, lambda v: v)),
            fill(
                total,
                lambda *row: apply(
                    Fn.LOG,
                    _fold(ReduceFn.SUM, x, row, lambda v: apply(Fn.EXP, apply(Fn.SUB, v, load(top, *row)))),
                ),
            ),
            fill(
                out,
                lambda *ijk: cast(
                    apply(Fn.SUB, apply(Fn.SUB, cast(load(x, *ijk), F32), load(top, *ijk[:-1])), load(total, *ijk[:-1])),
                    out.dtype,
                ),
            ),
        ),
    )


def _log_softmax_numpy(x: Any) -> Any:
    wide = x.astype(np.float32)
    shifted = wide - wide.max(-1, keepdims=True, initial=-np.inf)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(x.dtype)


SOFTMAX = define("softmax", "x", _like_first, _softmax_numpy, _softmax_nest)
LOG_SOFTMAX = define("log_softmax", "x", _like_first, _log_softmax_numpy, _log_softmax_nest)


# --- norms -------------------------------------------------------------------------------------------------------------


def _length(x: Buffer) -> Scalar:
    return cast(index_value(x.shape[-1]), F32)


def _numpy_mean(x: Any) -> Any:
    """Rows without elements have one, too."""
    return x.sum(-1, keepdims=True) / np.float32(x.shape[-1])


def _rms_nest(operands: Operands) -> Nest:
    """out = x / sqrt(mean(x^2) + eps) * (offset + weight)"""
    out, x, w = output(operands), operands.buffer(0), operands.buffer(1)
    eps, offset = const(operands.attrs["eps"], F32), operands.attrs["weight_offset"]
    scale = _stat("scale", x)

    def weight(j: Dim) -> Scalar:
        value = cast(load(w, j), F32)
        return apply(Fn.ADD, value, const(offset, F32)) if offset else value

    def mean(*row: Dim) -> Scalar:
        squares = _fold(ReduceFn.SUM, x, row, lambda v: apply(Fn.MUL, v, v))
        return apply(Fn.RSQRT, apply(Fn.ADD, apply(Fn.DIV, squares, _length(x)), eps))

    def value(*ijk: Dim) -> Scalar:
        normed = apply(Fn.MUL, cast(load(x, *ijk), F32), load(scale, *ijk[:-1]))
        return cast(apply(Fn.MUL, normed, weight(ijk[-1])), out.dtype)

    return Nest((out,), _program([scale], fill(scale, mean), fill(out, value)), checks=_weighted(operands))


def _rms_numpy(x: Any, w: Any, *, eps: float, weight_offset: float) -> Any:
    wide = x.astype(np.float32)
    scale = 1 / np.sqrt(_numpy_mean(wide * wide) + np.float32(eps))
    return (wide * scale * (w.astype(np.float32) + np.float32(weight_offset))).astype(x.dtype)


RMS_NORM = define("rms_norm", "x, weight", _norm, _rms_numpy, _rms_nest, {"eps": REQUIRED, "weight_offset": 0.0})


def _layer_nest(operands: Operands) -> Nest:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias"""
    out, x, w = output(operands), operands.buffer(0), operands.buffer(1)
    bias = operands.buffer(2) if operands.has(2) else None
    eps = const(operands.attrs["eps"], F32)
    mean, scale = _stat("mean", x), _stat("scale", x)

    def centred(value: Scalar, *row: Dim) -> Scalar:
        return apply(Fn.SUB, value, load(mean, *row))

    def spread(*row: Dim) -> Scalar:
        def square(v: Scalar) -> Scalar:
            return apply(Fn.MUL, centred(v, *row), centred(v, *row))

        variance = apply(Fn.DIV, _fold(ReduceFn.SUM, x, row, square), _length(x))
        return apply(Fn.RSQRT, apply(Fn.ADD, variance, eps))

    def value(*ijk: Dim) -> Scalar:
        row, j = ijk[:-1], ijk[-1]
        normed = apply(Fn.MUL, centred(cast(load(x, *ijk), F32), *row), load(scale, *row))
        weighted = apply(Fn.MUL, normed, cast(load(w, j), F32))
        return cast(weighted if bias is None else apply(Fn.ADD, weighted, cast(load(bias, j), F32)), out.dtype)

    average = fill(mean, lambda *row: apply(Fn.DIV, _fold(ReduceFn.SUM, x, row, lambda v: v), _length(x)))
    return Nest((out,), _program([mean, scale], average, fill(scale, spread), fill(out, value)), checks=_weighted(operands))


def _layer_numpy(x: Any, w: Any, bias: Any = None, *, eps: float) -> Any:
    wide = x.astype(np.float32)
    centred = wide - _numpy_mean(wide)
    scale = 1 / np.sqrt(_numpy_mean(centred * centred) + np.float32(eps))
    weighted = centred * scale * w.astype(np.float32)
    return (weighted if bias is None else weighted + bias.astype(np.float32)).astype(x.dtype)


LAYER_NORM = define("layer_norm", "x, weight, bias?", _norm, _layer_numpy, _layer_nest, {"eps": REQUIRED})
