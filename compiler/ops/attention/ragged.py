"""Operators on texts of different lengths, concatenated without padding: attention within each text, and mean and max pooling per text.

    starts [texts + 1]    the first token of each text; the last entry is the number of tokens
    text_ids [tokens]     the text of each token

Every token attends to all tokens of its text. If the operand `bias`, [heads, 2 * m + 1], is given, `bias[h, m + d]` is added to the score
of a key at distance `d` (the key's position minus the query's position); `d` is clamped to -m .. m. The mean of a text without tokens is
NaN, and its maximum is minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, index, largest, total
from compiler.ir.op import REQUIRED
from compiler.ir.relations import Relation, at_least
from compiler.ir.types import TensorType, Type
from compiler.ops.attention.plain import text_bounds
from compiler.ops.broadcast import output
from compiler.ops.indices import Extent, owners, starts_of
from compiler.ops.operands import agree, float_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32
TOKENS = "[tokens, heads, size]"


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
    return q


def _attention_relations(args: tuple[Type, ...], _: Mapping[str, Any]) -> Iterable[Relation]:
    """Require that q, k and v have heads, that `starts` has at least one entry, and that the bias has one entry per distance -m .. m."""
    for name, heads in zip("qkv", args, strict=False):
        if isinstance(heads, TensorType) and heads.shape is not None:
            yield at_least(heads.shape[1], 1, f"the number of heads of {name}")
    if isinstance(starts := args[4], TensorType) and starts.shape is not None:
        yield at_least(starts.shape[0], 1, "the length of starts")
    if len(args) > 5 and isinstance(bias := args[5], TensorType) and bias.shape is not None:
        sentence = f"bias has {bias.shape[1]} entries per head, expected an odd number: one per distance -m .. m"
        yield Relation(bias.shape[1] % 2, Dim.of(1), sentence)


def _attention_node(operands: Operands) -> Nest:
    q, k, v, text_ids, starts = (operands.buffer(i) for i in range(5))
    bias, out = operands.buffer(5) if operands.has(5) else None, output(operands)
    node = Attention(q, Ragged(k, v, starts), text_ids, out, float_attr(operands.attrs, "scale"), bias=bias)
    tokens, heads, _ = q.shape
    wanted: dict[int, tuple[Dim, ...]] = {1: q.shape, 2: q.shape, 3: (tokens,)}
    if bias is not None:
        wanted[5] = (heads, bias.shape[1])
    return Nest((out,), node, checks=unproved(operands, wanted))


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
    _attention_node,
    {"scale": REQUIRED},
    relations=_attention_relations,
    indices={"starts": starts_of(Extent("q")), "text_ids": owners("starts")},
)


# --- mean and maximum --------------------------------------------------------------------------------------------------


def _pooled_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    x = wants_float(tensor_operand(args, 0, "x", ndim=2, layout="[tokens, size]"), "x")
    starts = wants_int(tensor_operand(args, 1, "starts", ndim=1, layout="[texts + 1]"), "starts")
    if x.shape is None or starts.shape is None:
        return TensorType(None, x.dtype, 2)
    return TensorType((starts.shape[0] - 1, x.shape[1]), x.dtype)


Pool = Callable[[Dim, Callable[[Dim], Scalar]], Scalar]  # (number of tokens, their values by index) -> pooled value


def _mean_nest(operands: Operands) -> Nest:
    return _pooled_nest(operands, lambda count, value: total((count,), value) / cast(index(count), F32))


def _max_nest(operands: Operands) -> Nest:
    return _pooled_nest(operands, lambda count, value: largest((count,), value))


def _pooled_nest(operands: Operands, pool: Pool) -> Nest:
    k = Kernel()
    out, x, starts = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    tokens, size = x.shape
    with k.nest((out.shape[0],)) as (text,):
        start, end = text_bounds(k, starts, text, tokens)
        with k.nest((size,)) as (j,):
            pooled = pool(end - start, lambda i: cast(x[start + i, j], F32))
            out[text, j] = cast(pooled, out.dtype)
    return Nest((out.buffer,), k.body())


def _mean_numpy(x: Any, starts: Any) -> Any:
    totals = [x[a:b].sum(0, dtype=np.float32) for a, b in pairwise(starts)]
    return (np.array(totals, np.float32).reshape(len(totals), x.shape[1]) / np.diff(starts)[:, None].astype(np.float32)).astype(x.dtype)


def _max_numpy(x: Any, starts: Any) -> Any:
    found = [x[a:b].max(0, initial=-np.inf) for a, b in pairwise(starts)]
    return np.array(found, x.dtype).reshape(len(found), x.shape[1])


STARTS = {"starts": starts_of(Extent("x"))}
RAGGED_MEAN = define("ragged_mean", "x, starts", _pooled_type, _mean_numpy, _mean_nest, indices=STARTS)
RAGGED_MAX = define("ragged_max", "x, starts", _pooled_type, _max_numpy, _max_nest, indices=STARTS)
