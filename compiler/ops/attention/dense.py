"""Attention over whole tensors, for encoders and embedding models.

    q [batch, heads, queries, size]   k [batch, kv_heads, keys, size]   v [batch, kv_heads, keys, value_size]
    mask  broadcasts to [batch, heads, queries, keys]: bool (true: the query attends to the key), or numbers added to the scores

Query head `h` reads kv head `h // (heads / kv_heads)`. The last query is at the position of the last key, so query `i` is at position `i +
keys - queries`. With `causal`, a query attends to no key at a later position; with a window, a query attends to no key that is `window` or
more positions before the query. A query that attends to no key gives 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, const, contract, equal, exp, guard, largest, maximum, select, total
from compiler.ir.op import REQUIRED
from compiler.ir.relations import Relation, at_least, multiple
from compiler.ir.types import TensorType, Type
from compiler.ops.attention.plain import capped
from compiler.ops.broadcast import Shape, agree_stretched, element, fits, output
from compiler.ops.operands import agree, bool_attr, float_attr, int_attr, tensor_operand, unproved, wants_float
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32 = DType.F32
LOWEST = float(np.finfo(np.float32).min)


def check_attributes(attrs: Attrs) -> None:
    """Raise AnnotationError unless `scale` is a number, and `window` and `softcap` are at least 0."""
    float_attr(attrs, "scale")
    int_attr(attrs, "window", 0)
    if float_attr(attrs, "softcap") < 0:
        raise AnnotationError(f"attribute softcap is {attrs['softcap']}, expected a cap above 0, or 0 for none")


def heads_share(q: Type, keys: Type, axis: int) -> Iterable[Relation]:
    """Require that there are heads, and that equally many query heads read each kv head. `axis` is the axis of the kv heads."""
    if isinstance(q, TensorType) and isinstance(keys, TensorType) and q.shape is not None and keys.shape is not None:
        yield at_least(q.shape[1], 1, "the number of heads of q")
        yield from multiple(q.shape[1], keys.shape[axis], "the number of heads of q", "the number of kv heads")


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
    if len(args) > 3:
        mask, scores = tensor_operand(args, 3, "mask"), (batch, heads, queries, k.shape[2])
        if mask.dtype not in (None, DType.BOOL) and not mask.dtype.is_float:
            raise AnnotationError(f"mask holds {mask.dtype}, expected bool or floats")
        if mask.ndim is not None and mask.ndim > len(scores):
            raise AnnotationError(f"mask has rank {mask.ndim}, expected at most {len(scores)}")
        if mask.shape is not None:
            agree_stretched(mask.shape, scores)
    return TensorType((batch, heads, queries, v.shape[3]), q.dtype)


def _nest(operands: Operands) -> Nest:
    kernel, attrs = Kernel(), operands.attrs
    out, q, k, v = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(3)))
    mask = operands.buffer(3) if operands.has(3) else None
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    sums, top = (kernel.workspace(name, batch, heads, queries) for name in ("total", "top"))
    weights, scores = (kernel.workspace(name, batch, heads, queries, keys) for name in ("weights", "scores"))

    def score(b: Dim, h: Dim, i: Dim, j: Dim) -> Scalar:
        dot = contract(size, lambda r: cast(q[b, h, i, r], F32), lambda r: cast(k[b, h // group, j, r], F32))
        value = capped(dot * attrs["scale"], attrs["softcap"])
        if mask is not None:
            given = element(mask, (b, h, i, j), mask.dtype, scores.shape)
            value = select(given, value, -np.inf) if mask.dtype is DType.BOOL else value + cast(given, F32)
        if attrs["causal"] or attrs["window"]:
            position = i + keys - queries
            first = position - attrs["window"] + 1 if attrs["window"] else 0
            value = guard(first, j, position + 1 if attrs["causal"] else keys, value, -np.inf)
        return value

    with kernel.nest(scores.shape) as at:
        scores[at] = score(*at)
    with kernel.nest(top.shape) as row:
        top[row] = maximum(largest((keys,), lambda j: scores[*row, j]), LOWEST)
    with kernel.nest(weights.shape) as (*row, j):
        weights[*row, j] = exp(scores[*row, j] - top[*row])
    with kernel.nest(sums.shape) as row:
        found = total((keys,), lambda j: weights[*row, j])
        sums[row] = select(equal(found, 0.0), const(1.0, F32), found)
    with kernel.nest(out.shape) as (b, h, i, e):
        mixed = contract(keys, lambda j: weights[b, h, i, j], lambda j: cast(v[b, h // group, j, e], F32))
        out[b, h, i, e] = cast(mixed / sums[b, h, i], out.dtype)
    wanted: dict[int, Shape] = {1: (batch, kv_heads, keys, size), 2: (batch, kv_heads, keys, v.shape[3])}
    masked = () if mask is None else tuple(fits(3, mask.shape, scores.shape))
    return Nest((out.buffer,), kernel.body(), checks=unproved(operands, wanted), fits=masked)


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


ATTENTION = define(
    "attention",
    "q, k, v, mask?",
    _type,
    _numpy,
    _nest,
    {"scale": REQUIRED, "causal": False, "window": 0, "softcap": 0.0},
    relations=lambda args, _: heads_share(args[0], args[1], 1),
)
