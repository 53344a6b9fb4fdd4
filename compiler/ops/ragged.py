"""Texts of many lengths, one behind the other without padding: attention within each of them, and the mean of each.

    starts [texts + 1]    where each text begins; the last entry is the number of tokens
    text_ids [tokens]     to which text a token belongs

Every token sees all tokens of its text. `bias[h, m + d]`, where given, is added to the score of a key `d` places behind the query; beyond
`m` places either way the outermost entries count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Fn, ReduceFn, Scalar, Stmt
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_eq
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import output
from compiler.ops.nest import apply, cast, const, index_value, let, load, loops, reduce, seq, store
from compiler.ops.operands import agree, float_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32
TOKENS = "[tokens, heads, size]"


def within_text(starts: Buffer, text: Dim, num_tokens: Dim, body: Callable[[Dim, Dim], Stmt]) -> Stmt:
    """`body(start, end)` of a text."""

    def bound(name: str, index: Dim, then: Callable[[Dim], Stmt]) -> Stmt:
        return let(name, cast(load(starts, index), DType.I64), then, 0, num_tokens)

    return bound("start", text, lambda start: bound("end", text + 1, lambda end: body(start, end)))


# --- attention ---------------------------------------------------------------------------------------------------------


def _attention_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    float_attr(attrs, "scale")
    q, k, v = (wants_float(tensor_operand(args, i, n, ndim=3, layout=TOKENS), n) for i, n in enumerate("qkv"))
    if q.shape is not None:
        for name, other in (("k", k), ("v", v)):
            for i, (wanted, given) in enumerate(zip(q.shape, other.shape or q.shape, strict=True)):
                agree(wanted, given, f"dimension {i} of {name}")
    text_ids = wants_int(tensor_operand(args, 3, "text_ids", ndim=1, layout="[tokens]"), "text_ids")
    wants_int(tensor_operand(args, 4, "starts", ndim=1, layout="[texts + 1]"), "starts")
    if q.shape is not None and text_ids.shape is not None:
        agree(q.shape[0], text_ids.shape[0], "the length of text_ids")
    if len(args) > 5:
        bias = wants_float(tensor_operand(args, 5, "bias", ndim=2, layout="[heads, 2 * distance + 1]"), "bias")
        if q.shape is not None and bias.shape is not None:
            agree(q.shape[1], bias.shape[0], "the number of heads of bias")
        if bias.shape is not None and prove_eq(bias.shape[1] % 2, 0):
            raise AnnotationError(f"bias has {bias.shape[1]} entries per head, wants an odd number: as many before as behind a token")
    return q


def relative(bias: Buffer, key: Dim, query: Dim) -> Dim:
    """The entry for this distance."""
    furthest = bias.shape[1] // 2
    return dim_min(dim_max(key - query, -furthest), furthest) + furthest


def _attention_nest(operands: Operands) -> Nest:
    """The formula itself; the scheduler has a version that walks the keys once."""
    out = output(operands)
    q, k, v, text_ids, starts = (operands.buffer(i) for i in range(5))
    bias = operands.buffer(5) if operands.has(5) else None
    tokens, heads, size = q.shape
    scores = Buffer("scores", (tokens, heads, tokens), F32)
    top, total = Buffer("top", (tokens, heads), F32), Buffer("total", (tokens, heads), F32)

    def score(t: Dim, h: Dim, key: Dim) -> Scalar:
        def term(r: Dim) -> Scalar:
            return apply(Fn.MUL, cast(load(q, t, h, r), F32), cast(load(k, key, h, r), F32))

        scaled = apply(Fn.MUL, reduce(ReduceFn.SUM, (size,), term), const(operands.attrs["scale"], F32))
        return scaled if bias is None else apply(Fn.ADD, scaled, cast(load(bias, h, relative(bias, key, t)), F32))

    def token(t: Dim, start: Dim, end: Dim) -> Stmt:
        count = end - start

        def weight(h: Dim, key: Dim) -> Scalar:
            return apply(Fn.EXP, apply(Fn.SUB, load(scores, t, h, key), load(top, t, h)))

        def mixed(h: Dim, e: Dim) -> Stmt:
            value = reduce(ReduceFn.SUM, (count,), lambda i: apply(Fn.MUL, weight(h, start + i), cast(load(v, start + i, h, e), F32)))
            return store(out, (t, h, e), cast(apply(Fn.DIV, value, load(total, t, h)), out.dtype))

        return seq(
            loops((heads, count), lambda h, i: store(scores, (t, h, start + i), score(t, h, start + i))),
            loops((heads,), lambda h: store(top, (t, h), reduce(ReduceFn.MAX, (count,), lambda i: load(scores, t, h, start + i)))),
            loops((heads,), lambda h: store(total, (t, h), reduce(ReduceFn.SUM, (count,), lambda i: weight(h, start + i)))),
            loops((heads, size), mixed),
        )

    def each(t: Dim) -> Stmt:
        text = cast(load(text_ids, t), DType.I64)
        return let("text", text, lambda text: within_text(starts, text, tokens, lambda start, end: token(t, start, end)), 0)

    body = loops((tokens,), each)
    for buffer in (scores, top, total):
        body = Allocate(buffer, body)
    wanted: dict[int, tuple[Dim, ...]] = {1: q.shape, 2: q.shape, 3: (tokens,)}
    if bias is not None:
        wanted[5] = (heads, bias.shape[1])
    return Nest((out,), body, checks=unproved(operands, wanted), attrs={"attention": [operands.attrs["scale"]], "ragged": True})


def _attention_numpy(q: Any, k: Any, v: Any, text_ids: Any, starts: Any, bias: Any = None, *, scale: float) -> Any:
    out = np.zeros(q.shape, np.float32)
    for start, end in pairwise(starts):
        wide_q, wide_k, wide_v = (x[start:end].astype(np.float32).swapaxes(0, 1) for x in (q, k, v))  # [heads, tokens, size]
        scores = wide_q @ wide_k.swapaxes(1, 2) * np.float32(scale)
        if bias is not None:
            furthest, places = bias.shape[1] // 2, np.arange(end - start)
            distance = np.clip(places[None, :] - places[:, None], -furthest, furthest)
            scores = scores + bias[:, distance + furthest].astype(np.float32)
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        out[start:end] = (weights @ wide_v / weights.sum(-1, keepdims=True)).swapaxes(0, 1)
    return out.astype(q.dtype)


RAGGED_ATTENTION = define(
    "ragged_attention",
    "q, k, v, text_ids, starts, bias?",
    _attention_type,
    _attention_numpy,
    _attention_nest,
    {"scale": REQUIRED},
)


# --- mean --------------------------------------------------------------------------------------------------------------


def _mean_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    x = wants_float(tensor_operand(args, 0, "x", ndim=2, layout="[tokens, size]"), "x")
    starts = wants_int(tensor_operand(args, 1, "starts", ndim=1, layout="[texts + 1]"), "starts")
    if x.shape is None or starts.shape is None:
        return TensorType(None, x.dtype, 2)
    return TensorType((starts.shape[0] - 1, x.shape[1]), x.dtype)


def _mean_nest(operands: Operands) -> Nest:
    out, x, starts = output(operands), operands.buffer(0), operands.buffer(1)
    tokens, size = x.shape

    def text(s: Dim, start: Dim, end: Dim) -> Stmt:
        def mean(j: Dim) -> Scalar:
            total = reduce(ReduceFn.SUM, (end - start,), lambda i: cast(load(x, start + i, j), F32))
            return cast(apply(Fn.DIV, total, cast(index_value(end - start), F32)), out.dtype)

        return loops((size,), lambda j: store(out, (s, j), mean(j)))

    return Nest((out,), loops((out.shape[0],), lambda s: within_text(starts, s, tokens, lambda start, end: text(s, start, end))))


def _mean_numpy(x: Any, starts: Any) -> Any:
    totals = [x[a:b].sum(0, dtype=np.float32) for a, b in pairwise(starts)]
    return (np.array(totals, np.float32).reshape(-1, x.shape[1]) / np.diff(starts)[:, None].astype(np.float32)).astype(x.dtype)


RAGGED_MEAN = define("ragged_mean", "x, starts", _mean_type, _mean_numpy, _mean_nest)
