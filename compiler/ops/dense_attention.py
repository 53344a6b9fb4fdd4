"""Attention over whole tensors, as encoders and embedding models use it.

    q [batch, heads, queries, size]   k [batch, kv_heads, keys, size]   v [batch, kv_heads, keys, value_size]
    mask  broadcasts to [batch, heads, queries, keys]: bool (true is seen), or numbers that are added to the scores

Query head `h` reads kv head `h // (heads / kv_heads)`. The last query stands at the last key: causally, query `i` sees the keys up to
`i + keys - queries`, with a window only the last `window` of those. A query that sees nothing gets zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Fn, ReduceFn, Scalar
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_ne
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import Shape, broadcast_shapes, element, fits, output
from compiler.ops.nest import apply, cast, const, fill, guard, load, reduce, seq
from compiler.ops.operands import agree, bool_attr, float_attr, int_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32 = DType.F32
LOWEST = float(np.finfo(np.float32).min)


def check_attributes(attrs: Attrs) -> None:
    float_attr(attrs, "scale")
    int_attr(attrs, "window", 0)
    if float_attr(attrs, "softcap") < 0:
        raise AnnotationError(f"attribute softcap is {attrs['softcap']}, wants a cap above 0, or 0 for none")


def agree_heads(heads: Dim, kv_heads: Dim) -> None:
    if prove_ne(heads % kv_heads, 0):
        raise AnnotationError(f"{heads} query heads do not share {kv_heads} kv heads evenly")


def _type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    check_attributes(attrs)
    bool_attr(attrs, "causal")
    q, k, v = (wants_float(tensor_operand(args, i, n, ndim=4, layout="[batch, heads, length, size]"), n) for i, n in enumerate("qkv"))
    if q.shape is None or k.shape is None or v.shape is None:
        return TensorType(None, q.dtype, 4)
    batch, heads, queries, size = q.shape
    agree(batch, k.shape[0], "the batch of k")
    agree(size, k.shape[3], "the size of k")
    for i in range(3):
        agree(k.shape[i], v.shape[i], f"dimension {i} of v")
    agree_heads(heads, k.shape[1])
    if len(args) > 3:
        mask, scores = tensor_operand(args, 3, "mask"), (batch, heads, queries, k.shape[2])
        if mask.dtype not in (None, DType.BOOL) and not mask.dtype.is_float:
            raise AnnotationError(f"mask holds {mask.dtype}, wants bool or floats")
        if mask.shape is not None and len(broadcast_shapes(scores, mask.shape)) > 4:
            raise AnnotationError(f"mask has rank {mask.ndim}, wants at most 4")
    return TensorType((batch, heads, queries, v.shape[3]), q.dtype)


def capped(score: Scalar, softcap: float) -> Scalar:
    """cap * tanh(score / cap)"""
    if not softcap:
        return score
    cap = const(softcap, F32)
    return apply(Fn.MUL, apply(Fn.TANH, apply(Fn.DIV, score, cap)), cap)


def _nest(operands: Operands) -> Nest:
    out, attrs = output(operands), operands.attrs
    q, k, v = (operands.buffer(i) for i in range(3))
    mask = operands.buffer(3) if operands.has(3) else None
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    scores, weights = (Buffer(name, (batch, heads, queries, keys), F32) for name in ("scores", "weights"))
    top, total = (Buffer(name, (batch, heads, queries), F32) for name in ("top", "total"))

    def score(b: Dim, h: Dim, i: Dim, j: Dim) -> Scalar:
        def term(r: Dim) -> Scalar:
            return apply(Fn.MUL, cast(load(q, b, h, i, r), F32), cast(load(k, b, h // group, j, r), F32))

        value = capped(apply(Fn.MUL, reduce(ReduceFn.SUM, (size,), term), const(attrs["scale"], F32)), attrs["softcap"])
        hidden = const(-np.inf, F32)
        if mask is not None:
            given = element(mask, (b, h, i, j), mask.dtype, scores.shape)
            value = apply(Fn.SELECT, given, value, hidden) if mask.dtype is DType.BOOL else apply(Fn.ADD, value, cast(given, F32))
        place = i + keys - queries
        first = place - attrs["window"] + 1 if attrs["window"] else Dim.of(0)
        if attrs["causal"] or attrs["window"]:
            value = guard(first, j, place + 1 if attrs["causal"] else keys, value, hidden)
        return value

    def highest(*row: Dim) -> Scalar:
        return apply(Fn.MAX, reduce(ReduceFn.MAX, (keys,), lambda j: load(scores, *row, j)), const(LOWEST, F32))

    def weight(*at: Dim) -> Scalar:
        return apply(Fn.EXP, apply(Fn.SUB, load(scores, *at), load(top, *at[:-1])))

    def whole(*row: Dim) -> Scalar:
        found = reduce(ReduceFn.SUM, (keys,), lambda j: load(weights, *row, j))
        return apply(Fn.SELECT, apply(Fn.EQ, found, const(0.0, F32)), const(1.0, F32), found)

    def mixed(b: Dim, h: Dim, i: Dim, e: Dim) -> Scalar:
        found = reduce(ReduceFn.SUM, (keys,), lambda j: apply(Fn.MUL, load(weights, b, h, i, j), cast(load(v, b, h // group, j, e), F32)))
        return cast(apply(Fn.DIV, found, load(total, b, h, i)), out.dtype)

    body = seq(fill(scores, score), fill(top, highest), fill(weights, weight), fill(total, whole), fill(out, mixed))
    for buffer in (scores, weights, top, total):
        body = Allocate(buffer, body)
    wanted: dict[int, Shape] = {1: (batch, kv_heads, keys, size), 2: (batch, kv_heads, keys, v.shape[3])}
    masked = () if mask is None else tuple(fits(3, mask.shape, scores.shape))
    return Nest((out,), body, checks=unproved(operands, wanted), fits=masked)


def _numpy(q: Any, k: Any, v: Any, mask: Any = None, *, scale: float, causal: bool, window: int, softcap: float) -> Any:
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x.astype(np.float32), group, 1) for x in (k, v))
    scores = q.astype(np.float32) @ np.swapaxes(wide_k, -1, -2) * np.float32(scale)
    if softcap:
        scores = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask.astype(np.float32)
    queries, keys = scores.shape[-2:]
    place = np.arange(queries)[:, None] + keys - queries
    seen = np.ones((queries, keys), np.bool_)
    if causal:
        seen &= np.arange(keys) <= place
    if window:
        seen &= np.arange(keys) > place - window
    scores = np.where(seen, scores, -np.inf).astype(np.float32)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), np.float32(LOWEST)))
    total = weights.sum(-1, keepdims=True)
    return (weights @ wide_v / np.where(total == 0, np.float32(1), total)).astype(q.dtype)


ATTENTION = define("attention", "q, k, v, mask?", _type, _numpy, _nest, {"scale": REQUIRED, "causal": False, "window": 0, "softcap": 0.0})
