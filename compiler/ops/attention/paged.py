"""Attention over the paged KV cache of kv_cache.py.

Token `t` is at position `positions[t]` of sequence `seq_ids[t]`. The token attends to all positions of its sequence up to its own position;
with a window, only to the last `window` of these positions. If `positions` is [tokens, 2], its columns are the first and the last position
that each token attends to, and there is no window. Query head `h` reads kv head `h // (heads / kv_heads)`. With a `value_size`, the cache
has only keys, and a value is the first `value_size` elements of its key. With a `softcap`, a score x becomes softcap * tanh(x / softcap).
Each entry of `sinks`, [heads], is the score of a further key, whose value is 0.

Over pages of bf16, a back end may round queries and attention weights to bf16, so that a machine's units for bf16 multiply them. If the
attribute `exact` is true, a back end must not round them to bf16. Over pages of 8 bits, a back end may round queries and attention weights
to integers of `row_bits` bits, 8 or 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_le
from compiler.ir.types import TensorType, Type
from compiler.ops.attention.dense import check_attributes, heads_share
from compiler.ops.attention.kv_cache import PAGE, TOKENS, cache_operand, check_layer, check_per_token, layer_operand, scales_operand
from compiler.ops.broadcast import output
from compiler.ops.indices import Extent, checked, clamped
from compiler.ops.operands import agree, bool_attr, float_attr, int_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define


def _attention_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    check_attributes(attrs)
    if (row_bits := int_attr(attrs, "row_bits", 8)) not in (8, 16):
        raise AnnotationError(f"attribute row_bits is {row_bits}, expected 8 or 16")
    q = wants_float(tensor_operand(args, 0, "q", ndim=3, layout=TOKENS), "q")
    tokens, heads, size = q.shape or (None, None, None)
    value_size = int_attr(attrs, "value_size", 0)
    cache = cache_operand(args, 1, 1 if value_size else 2, None, size)
    if value_size and size is not None and not prove_le(value_size, size):
        raise AnnotationError(f"attribute value_size is {value_size}, expected at most {size}, the size of a key")
    wants_int(tensor_operand(args, 2, "page_tables", ndim=2, layout="[sequences, pages]"), "page_tables")
    check_per_token(args, 3, "seq_ids", tokens)
    _check_positions(args, tokens, int_attr(attrs, "window"))
    check_layer(args[5])
    first = 6  # index of the optional operands: scales if the cache is i8, then sinks
    if cache.dtype is DType.I8:
        scales_operand(args, 6, cache)
        first = 7
    if len(args) > first:
        sinks = wants_float(tensor_operand(args, first, "sinks", ndim=1, layout="[heads]"), "sinks")
        if sinks.shape is not None and heads is not None:
            agree(heads, sinks.shape[0], "the length of sinks")
    return q if not value_size or q.shape is None else TensorType((*q.shape[:2], Dim.of(value_size)), q.dtype)


def _check_positions(args: tuple[Type, ...], tokens: Dim | None, window: int) -> None:
    """Raise AnnotationError unless the operand `positions` is [tokens], or is [tokens, 2] and there is no window."""
    type_ = args[4]
    if not isinstance(type_, TensorType) or type_.ndim != 2:
        check_per_token(args, 4, "positions", tokens)
        return
    shape = wants_int(type_, "positions").shape
    if window:
        raise AnnotationError(f"attribute window is {window}, expected 0, because positions have the first position of each token")
    if shape is not None:
        agree(Dim.of(2), shape[1], "the number of columns of positions")
        if tokens is not None:
            agree(tokens, shape[0], "the length of positions")


def _attention_node(operands: Operands) -> Nest:
    q, cache, tables, sequences, positions = (operands.buffer(i) for i in range(5))
    out, attrs = output(operands), operands.attrs
    place_of_scales = 6 if cache.dtype is DType.I8 else None
    place_of_sinks = 6 if place_of_scales is None else 7
    scales = None if place_of_scales is None else operands.buffer(place_of_scales)
    sinks = operands.buffer(place_of_sinks) if operands.has(place_of_sinks) else None
    node = Attention(
        queries=q,
        keys=Paged(cache, tables, layer_operand(operands.places[5]), scales, has_values=not attrs["value_size"]),
        sequences=sequences,
        positions=positions,
        out=out,
        scale=float_attr(attrs, "scale"),
        window=int_attr(attrs, "window"),
        softcap=float_attr(attrs, "softcap"),
        sinks=sinks,
        exact=bool_attr(attrs, "exact"),
        row_bits=int_attr(attrs, "row_bits", 8),
    )
    tokens, heads, size = q.shape
    in_pages = cache.shape[0], Dim.of(1 if attrs["value_size"] else 2), *cache.shape[2:4]
    wanted: dict[int, tuple[Dim, ...]] = {1: (*in_pages, size * PAGE), 3: (tokens,), 4: (tokens, *positions.shape[1:])}
    if place_of_scales is not None:
        wanted[place_of_scales] = (*in_pages, Dim.of(PAGE))
    if sinks is not None:
        wanted[place_of_sinks] = (heads,)
    return Nest((out,), node, checks=unproved(operands, wanted))


def _attention_numpy(
    q: Any,
    cache: Any,
    tables: Any,
    seq_ids: Any,
    positions: Any,
    layer: Any,
    *extras: Any,
    scale: float,
    window: int,
    softcap: float,
    value_size: int,
    exact: bool,
    row_bits: int,
) -> Any:
    scales, *rest = extras if cache.dtype == np.int8 else (None, *extras)
    sinks = rest[0] if rest else None
    out = np.zeros((*q.shape[:2], value_size or q.shape[2]), np.float32)
    pages_shape = (*cache.shape[2:4],)
    keys = cache[layer, 0].reshape(*pages_shape, q.shape[2], PAGE)
    values = np.swapaxes(keys[:, :, :value_size], 2, 3) if value_size else cache[layer, 1].reshape(*pages_shape, PAGE, q.shape[2])
    group = q.shape[1] // keys.shape[1]
    lasts = positions[:, 1] if positions.ndim == 2 else positions
    firsts = positions[:, 0] if positions.ndim == 2 else np.maximum(0, positions - window + 1) if window else 0 * positions
    for t, (s, first, last) in enumerate(zip(seq_ids, firsts, lasts, strict=True)):
        at = np.arange(first, last + 1)
        pages, offsets = tables[s, at // PAGE], at % PAGE
        k = keys[pages, :, :, offsets].astype(np.float32)  # [positions, kv_heads, size]
        v = values[pages, :, offsets, :].astype(np.float32)
        if scales is not None:
            k = k * scales[layer, 0, pages, :, offsets][..., None].astype(np.float32)
            v = v * scales[layer, -1, pages, :, offsets][..., None].astype(np.float32)
        for h in range(q.shape[1]):
            score = k[:, h // group] @ q[t, h].astype(np.float32) * np.float32(scale)
            if softcap:
                score = np.tanh(score / np.float32(softcap)) * np.float32(softcap)
            top = score.max() if sinks is None else max(score.max(), float(sinks[h]))
            e = np.exp(score - top)
            total = e.sum() + (0.0 if sinks is None else np.exp(np.float32(sinks[h]) - top))
            out[t, h] = e @ v[:, h // group] / total
    return out.astype(q.dtype)


PAGED_ATTENTION = define(
    "paged_attention",
    "q, cache, page_tables, seq_ids, positions, layer, scales_or_sinks?, sinks?",
    _attention_type,
    _attention_numpy,
    _attention_node,
    {"scale": REQUIRED, "window": 0, "softcap": 0.0, "value_size": 0, "exact": False, "row_bits": 16},
    relations=lambda args, _: heads_share(args[0], args[1], 3),
    indices={
        "page_tables": clamped(Extent("cache", 2), ahead=True),
        "seq_ids": clamped(Extent("page_tables"), ahead=True),
        "positions": clamped(Extent("page_tables", 1, PAGE), ahead=True),
        "layer": checked(Extent("cache")),
    },
)
