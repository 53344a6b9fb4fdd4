"""Attention over a paged cache, and appending to it.

The cache of a whole model is one tensor, `[layers, 2, pages, kv_heads, PAGE * size]`; the second axis has keys, then values. In a page

    keys     are [size, PAGE]     tokens innermost: one vector holds an element of all keys of a page
    values   are [PAGE, size]     elements innermost: one vector holds part of a value

Token `t` is at position `positions[t]` of sequence `seq_ids[t]`, and sees the positions up to its own. Position `p` of a sequence is in
page `page_tables[seq, p // PAGE]` at offset `p % PAGE`. Query head `h` reads kv head `h // (heads / kv_heads)`. The layer is an operand,
so that all layers share one kernel.

An 8-bit cache has a scale per token and head, `[layers, 2, pages, kv_heads, PAGE]`: it stores `round(x / scale)`, where the largest
magnitude of a token's head is stored as 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Const, Scalar, ScalarParam
from compiler.ir.op import REQUIRED
from compiler.ir.types import ObjectType, ScalarType, TensorType, TupleType, Type
from compiler.ir.write import Array, Kernel, cast, exp, largest, maximum, round_half_even, total
from compiler.ops.broadcast import output
from compiler.ops.dense_attention import agree_heads, capped, check_attributes
from compiler.ops.operands import agree, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, Place, define

PAGE = 16

F32 = DType.F32


def key_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    """The index within a page of element `j` of the key at `offset`."""
    return j * PAGE + offset


def value_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    return offset * size + j


def _layer_index(k: Kernel, layer: Place | None, cache: Array) -> Dim:
    """The operand `layer` as an index of the cache."""
    assert isinstance(layer, ScalarParam | Const)
    return k.let("layer", cast(layer, DType.I64), cache.shape[0] - 1)


# --- appending ---------------------------------------------------------------------------------------------------------


CACHE = "[layers, 2, pages, kv_heads, PAGE * size]"
TOKENS = "[tokens, heads, size]"


def _cache(args: tuple[Type, ...], index: int, heads: Dim | None, size: Dim | None) -> TensorType:
    """The annotation of the cache; its pages hold vectors of this size."""
    cache = tensor_operand(args, index, "cache", ndim=5, layout=CACHE)
    if cache.shape is not None:
        agree(Dim.of(2), cache.shape[1], "dimension 1 of cache")
        if heads is not None:
            agree(heads, cache.shape[3], "the number of kv heads of cache")
        if size is not None:
            agree(size * PAGE, cache.shape[4], "what a page of cache holds per head")
    return cache


def _layer(type_: Type) -> None:
    if not isinstance(type_, ScalarType | ObjectType) or (isinstance(type_, ScalarType) and type_.dtype and not type_.dtype.is_int):
        raise AnnotationError(f"layer is {type_}, wants an integer")


def _per_token(args: tuple[Type, ...], index: int, name: str, tokens: Dim | None) -> None:
    type_ = wants_int(tensor_operand(args, index, name, ndim=1, layout="[tokens]"), name)
    if type_.shape is not None and tokens is not None:
        agree(tokens, type_.shape[0], f"the length of {name}")


def _scales(args: tuple[Type, ...], index: int, cache: TensorType) -> Type:
    """The annotation of the scales: an 8-bit cache needs them, and no other cache may have them."""
    if len(args) <= index:
        if cache.dtype is DType.I8:
            raise AnnotationError("cache is i8, and its scales are missing")
        return ObjectType()
    scales = wants_float(tensor_operand(args, index, "scales", ndim=5, layout="[layers, 2, pages, kv_heads, PAGE]"), "scales")
    if cache.dtype not in (None, DType.I8):
        raise AnnotationError(f"cache is {cache.dtype}, and only an i8 cache has scales")
    if cache.shape is not None and scales.shape is not None:
        for i, (wanted, given) in enumerate(zip((*cache.shape[:4], Dim.of(PAGE)), scales.shape, strict=True)):
            agree(wanted, given, f"dimension {i} of scales")
    return scales


def _append_type(args: tuple[Type, ...], _: Any) -> Type:
    k, v = (wants_float(tensor_operand(args, i, n, ndim=3, layout=TOKENS), n) for i, n in ((1, "k"), (2, "v")))
    for i, (wanted, given) in enumerate(zip(k.shape or (), v.shape or k.shape or (), strict=True)):
        agree(wanted, given, f"dimension {i} of v")
    tokens, heads, size = k.shape or (None, None, None)
    _per_token(args, 3, "slots", tokens)
    _layer(args[4])
    cache = _cache(args, 0, heads, size)
    scales = _scales(args, 5, cache)
    return cache if len(args) == 5 else TupleType((cache, scales))


def _append_nest(operands: Operands) -> Nest:
    """kv_append(cache, k[t, kv_heads, size], v, slots[t], layer, scales?): slot = page * PAGE + offset."""
    kernel = Kernel()
    held, k, v, slots = (operands.buffer(i) for i in range(4))
    cache = kernel.array(Buffer("new_cache", held.shape, held.dtype))
    tokens, heads, size = k.shape
    wanted = {0: (held.shape[0], Dim.of(2), held.shape[2], heads, size * PAGE), 2: k.shape, 3: (tokens,)}
    layer = _layer_index(kernel, operands.places[4], cache)
    if not operands.has(5):
        _write_cache(kernel, layer, cache, None, (k, v), slots)
        return Nest((cache.buffer,), kernel.body(), inplace=(0,), checks=unproved(operands, wanted))
    held_scales = operands.buffer(5)
    scales = kernel.array(Buffer("new_scales", held_scales.shape, held_scales.dtype))
    wanted[5] = (*held.shape[:4], Dim.of(PAGE))
    _write_scales(kernel, layer, scales, (k, v), slots)
    _write_cache(kernel, layer, cache, scales, (k, v), slots)
    return Nest((cache.buffer, scales.buffer), kernel.body(), inplace=(0, 5), checks=unproved(operands, wanted))


def _place(kernel: Kernel, slots: Buffer, t: Dim) -> tuple[Dim, Dim]:
    """The page of a token, and its offset there."""
    slot = kernel.let("slot", cast(kernel.array(slots)[t], DType.I64))
    return slot // PAGE, slot % PAGE


def _write_scales(kernel: Kernel, layer: Dim, scales: Array, sources: tuple[Buffer, Buffer], slots: Buffer) -> None:
    """The scales of the keys, then those of the values."""
    for which, x in enumerate(kernel.arrays(*sources)):
        tokens, heads, size = x.shape
        with kernel.nest((tokens,)) as (t,):
            page, offset = _place(kernel, slots, t)
            with kernel.nest((heads,)) as (h,):
                scales[layer, which, page, h, offset] = cast(_magnitude(x, t, h, size) / 127.0, scales.dtype)


def _magnitude(x: Array, t: Dim, h: Dim, size: Dim) -> Scalar:
    return largest((size,), lambda r: abs(cast(x[t, h, r], F32)))


def _write_cache(kernel: Kernel, layer: Dim, cache: Array, scales: Array | None, sources: tuple[Buffer, Buffer], slots: Buffer) -> None:
    """The keys, then the values."""
    for which, (x, index) in enumerate(zip(kernel.arrays(*sources), (key_index, value_index), strict=True)):
        tokens, heads, size = x.shape
        with kernel.nest((tokens,)) as (t,):
            page, offset = _place(kernel, slots, t)
            with kernel.nest((heads, size)) as (h, j):
                value: Scalar = x[t, h, j]
                if scales is not None:
                    value = round_half_even(cast(value, F32) / cast(scales[layer, which, page, h, offset], F32))
                cache[layer, which, page, h, index(size, offset, j)] = cast(value, cache.dtype)


def _append_numpy(cache: Any, k: Any, v: Any, slots: Any, layer: Any, scales: Any = None) -> Any:
    cache = cache.copy()
    size = k.shape[2]
    if scales is not None:
        scales = scales.copy()
        for which, x in enumerate((k, v)):
            scale = np.abs(x.astype(np.float32)).max(-1, initial=0.0) / np.float32(127)  # [tokens, heads]
            scales[layer, which, slots // PAGE, :, slots % PAGE] = scale
            with np.errstate(invalid="ignore"):
                levels = np.nan_to_num(np.rint(x.astype(np.float32) / scale[..., None])).astype(np.int8)
            k, v = (levels, v) if which == 0 else (k, levels)
    for i, slot in enumerate(slots):
        page, offset = int(slot) // PAGE, int(slot) % PAGE
        cache[layer, 0, page].reshape(-1, size, PAGE)[:, :, offset] = k[i].astype(cache.dtype)
        cache[layer, 1, page].reshape(-1, PAGE, size)[:, offset, :] = v[i].astype(cache.dtype)
    return cache if scales is None else (cache, scales)


KV_APPEND = define("kv_append", "cache, k, v, slots, layer, scales?", _append_type, _append_numpy, _append_nest)


# --- attending ---------------------------------------------------------------------------------------------------------


def _attention_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    check_attributes(attrs)
    q = wants_float(tensor_operand(args, 0, "q", ndim=3, layout=TOKENS), "q")
    tokens, heads, size = q.shape or (None, None, None)
    cache = _cache(args, 1, None, size)
    if cache.shape is not None and heads is not None:
        agree_heads(heads, cache.shape[3])
    wants_int(tensor_operand(args, 2, "page_tables", ndim=2, layout="[sequences, pages]"), "page_tables")
    _per_token(args, 3, "seq_ids", tokens)
    _per_token(args, 4, "positions", tokens)
    _layer(args[5])
    first = 6  # of the optional operands: scales where the cache is i8, then sinks
    if cache.dtype is DType.I8:
        _scales(args, 6, cache)
        first = 7
    if len(args) > first:
        sinks = wants_float(tensor_operand(args, first, "sinks", ndim=1, layout="[heads]"), "sinks")
        if sinks.shape is not None and heads is not None:
            agree(heads, sinks.shape[0], "the length of sinks")
    return q


def _attention_nest(operands: Operands) -> Nest:
    """The formula as it stands: scores, their maximum, the sum of exponentials, the weighted values. The schedule of paged attention
    computes the same and reads the pages once."""
    kernel, attrs = Kernel(), operands.attrs
    out, q, cache, tables, seq_ids, positions = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(5)))
    scales = kernel.array(operands.buffer(6)) if cache.dtype is DType.I8 else None
    place_of_sinks = 6 if scales is None else 7
    sinks = kernel.array(operands.buffer(place_of_sinks)) if operands.has(place_of_sinks) else None
    tokens, heads, size = q.shape
    group = heads // cache.shape[3]
    max_positions = tables.shape[1] * PAGE  # of a page table
    sums = kernel.workspace("sums", tokens, heads, size)
    weight_sum, top = kernel.workspace("total", tokens, heads), kernel.workspace("top", tokens, heads)
    scores = kernel.workspace("scores", tokens, heads, max_positions)

    def cached(layer: Dim, which: int, page: Dim, h: Dim, offset: Dim, index: Dim) -> Scalar:
        """An element of the cache, decoded."""
        value = cast(cache[layer, which, page, h // group, index], F32)
        return value if scales is None else value * cast(scales[layer, which, page, h // group, offset], F32)

    def score(layer: Dim, t: Dim, h: Dim, page: Dim, offset: Dim) -> Scalar:
        def term(r: Dim) -> Scalar:
            return cast(q[t, h, r], F32) * cached(layer, 0, page, h, offset, key_index(size, offset, r))

        return capped(total((size,), term) * attrs["scale"], attrs["softcap"])

    def weight(t: Dim, h: Dim, p: Dim) -> Scalar:
        return exp(scores[t, h, p] - top[t, h])

    def attend(t: Dim, layer: Dim) -> None:
        position = kernel.let("position", cast(positions[t], DType.I64))
        s = kernel.let("s", cast(seq_ids[t], DType.I64))
        low = dim_max(0, position - (attrs["window"] - 1)) if attrs["window"] else Dim.of(0)
        count = position + 1 - low
        with kernel.nest((heads, count)) as (h, i):
            p = i + low
            page = kernel.let("page", cast(tables[s, p // PAGE], DType.I64))
            scores[t, h, p] = score(layer, t, h, page, p % PAGE)
        with kernel.nest((heads,)) as (h,):
            highest = largest((count,), lambda i: scores[t, h, i + low])
            top[t, h] = highest if sinks is None else maximum(highest, cast(sinks[h], F32))
        with kernel.nest((heads,)) as (h,):
            weights = total((count,), lambda i: weight(t, h, i + low))
            weight_sum[t, h] = weights if sinks is None else weights + exp(cast(sinks[h], F32) - top[t, h])
        with kernel.nest((heads, size)) as (h, j):
            sums[t, h, j] = 0.0
        with kernel.nest((count,)) as (i,):
            p = i + low
            page = kernel.let("page", cast(tables[s, p // PAGE], DType.I64))
            with kernel.nest((heads, size)) as (h, j):
                value = cached(layer, 1, page, h, p % PAGE, value_index(size, p % PAGE, j))
                sums[t, h, j] = sums[t, h, j] + weight(t, h, p) * value  # rounded twice

    with kernel.scope():
        layer = _layer_index(kernel, operands.places[5], cache)
        with kernel.nest((tokens,)) as (t,):
            attend(t, layer)
    with kernel.nest(out.shape) as (t, h, j):
        out[t, h, j] = cast(sums[t, h, j] / weight_sum[t, h], out.dtype)
    wanted = {1: (*cache.shape[:1], Dim.of(2), *cache.shape[2:4], size * PAGE), 3: (tokens,), 4: (tokens,)}
    if scales is not None:
        wanted[6] = (*cache.shape[:1], Dim.of(2), *cache.shape[2:4], Dim.of(PAGE))
    if sinks is not None:
        wanted[place_of_sinks] = (heads,)
    kept = {"attention": [attrs["scale"], attrs["window"], attrs["softcap"]]}
    return Nest((out.buffer,), kernel.body(), checks=unproved(operands, wanted), attrs=kept)


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
) -> Any:
    scales, *rest = extras if cache.dtype == np.int8 else (None, *extras)
    sinks = rest[0] if rest else None
    out = np.zeros(q.shape, np.float32)
    pages_shape = (*cache.shape[2:4],)
    keys = cache[layer, 0].reshape(*pages_shape, q.shape[2], PAGE)
    values = cache[layer, 1].reshape(*pages_shape, PAGE, q.shape[2])
    group = q.shape[1] // keys.shape[1]
    for t, (s, position) in enumerate(zip(seq_ids, positions, strict=True)):
        low = max(0, position - window + 1) if window else 0
        at = np.arange(low, position + 1)
        pages, offsets = tables[s, at // PAGE], at % PAGE
        k = keys[pages, :, :, offsets].astype(np.float32)  # [positions, kv_heads, size]
        v = values[pages, :, offsets, :].astype(np.float32)
        if scales is not None:
            k = k * scales[layer, 0, pages, :, offsets][..., None].astype(np.float32)
            v = v * scales[layer, 1, pages, :, offsets][..., None].astype(np.float32)
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
    _attention_nest,
    {"scale": REQUIRED, "window": 0, "softcap": 0.0},
)
