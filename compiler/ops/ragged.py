"""Texts of different lengths, concatenated without padding: attention within each text, and the mean of each text.

    starts [texts + 1]    where each text begins; the last entry is the number of tokens
    text_ids [tokens]     the text of each token

Every token sees all tokens of its text. `bias[h, m + d]`, where given, is added to the score of a key `d` positions behind the query; a
distance above `m`, in either direction, counts as `m`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Scalar
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_eq
from compiler.ir.types import TensorType, Type
from compiler.ir.write import Array, Kernel, cast, exp, index, largest, total
from compiler.ops.broadcast import output
from compiler.ops.operands import agree, float_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32
TOKENS = "[tokens, heads, size]"


def _bounds(k: Kernel, starts: Array, text: Dim, num_tokens: Dim) -> tuple[Dim, Dim]:
    """The first token of a text, and the one behind its last."""
    start = k.let("start", cast(starts[text], DType.I64), num_tokens)
    return start, k.let("end", cast(starts[text + 1], DType.I64), num_tokens)


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
    """The entry of `bias` for the distance from the query to the key."""
    furthest = bias.shape[1] // 2
    return dim_min(dim_max(key - query, -furthest), furthest) + furthest


def _attention_nest(operands: Operands) -> Nest:
    """The formula as it stands; the schedule of ragged attention reads the keys once."""
    kernel = Kernel()
    out, q, k, v, text_ids, starts = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(5)))
    bias = kernel.array(operands.buffer(5)) if operands.has(5) else None
    tokens, heads, size = q.shape
    sums, top = kernel.workspace("total", tokens, heads), kernel.workspace("top", tokens, heads)
    scores = kernel.workspace("scores", tokens, heads, tokens)

    def score(t: Dim, h: Dim, key: Dim) -> Scalar:
        scaled = total((size,), lambda r: cast(q[t, h, r], F32) * cast(k[key, h, r], F32)) * operands.attrs["scale"]
        return scaled if bias is None else scaled + cast(bias[h, relative(bias.buffer, key, t)], F32)

    def weight(t: Dim, h: Dim, key: Dim) -> Scalar:
        return exp(scores[t, h, key] - top[t, h])

    with kernel.nest((tokens,)) as (t,):
        text = kernel.let("text", cast(text_ids[t], DType.I64))
        start, end = _bounds(kernel, starts, text, tokens)
        count = end - start
        with kernel.nest((heads, count)) as (h, i):
            scores[t, h, start + i] = score(t, h, start + i)
        with kernel.nest((heads,)) as (h,):
            top[t, h] = largest((count,), lambda i: scores[t, h, start + i])
        with kernel.nest((heads,)) as (h,):
            sums[t, h] = total((count,), lambda i: weight(t, h, start + i))
        with kernel.nest((heads, size)) as (h, e):
            mixed = total((count,), lambda i: weight(t, h, start + i) * cast(v[start + i, h, e], F32))
            out[t, h, e] = cast(mixed / sums[t, h], out.dtype)
    wanted: dict[int, tuple[Dim, ...]] = {1: q.shape, 2: q.shape, 3: (tokens,)}
    if bias is not None:
        wanted[5] = (heads, bias.shape[1])
    return Nest(
        (out.buffer,), kernel.body(), checks=unproved(operands, wanted), attrs={"attention": [operands.attrs["scale"]], "ragged": True}
    )


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
    k = Kernel()
    out, x, starts = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    tokens, size = x.shape
    with k.nest((out.shape[0],)) as (text,):
        start, end = _bounds(k, starts, text, tokens)
        with k.nest((size,)) as (j,):
            mean = total((end - start,), lambda i: cast(x[start + i, j], F32)) / cast(index(end - start), F32)
            out[text, j] = cast(mean, out.dtype)
    return Nest((out.buffer,), k.body())


def _mean_numpy(x: Any, starts: Any) -> Any:
    totals = [x[a:b].sum(0, dtype=np.float32) for a, b in pairwise(starts)]
    return (np.array(totals, np.float32).reshape(-1, x.shape[1]) / np.diff(starts)[:, None].astype(np.float32)).astype(x.dtype)


RAGGED_MEAN = define("ragged_mean", "x, starts", _mean_type, _mean_numpy, _mean_nest)
