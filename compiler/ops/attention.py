"""Attention over a paged cache, and appending to it.

The cache of a whole model is one tensor, `[layers, 2, pages, kv_heads, PAGE * size]`; 2 are keys and values. Inside a page

    keys     lie as [size, PAGE]     tokens innermost: one vector holds an element of all keys of a page
    values   lie as [PAGE, size]     elements innermost: one vector holds part of a value

Token `t` of sequence `seq_ids[t]` stands at `positions[t]` and sees positions up to its own; position `p` of a sequence lies in page
`page_tables[seq, p // PAGE]` at `p % PAGE`. Query head `h` reads kv head `h // (heads / kv_heads)`. The layer is an operand, so that all
layers share one kernel.

An 8-bit cache has a scale per token and head beside it, `[layers, 2, pages, kv_heads, PAGE]`: what is stored is `round(x / scale)`, and
the largest element of a token's head is stored as 127.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Allocate, Buffer, Const, Fn, ReduceFn, Scalar, ScalarParam, Stmt
from compiler.ir.op import REQUIRED
from compiler.ir.types import ObjectType, ScalarType, TensorType, TupleType, Type
from compiler.ops.broadcast import output
from compiler.ops.dense_attention import agree_heads, capped, check_attributes
from compiler.ops.nest import apply, cast, const, fill, let, load, loops, reduce, seq, store
from compiler.ops.operands import agree, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

PAGE = 16

F32 = DType.F32


def key_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    """Where element `j` of the key at `offset` stands in its page."""
    return j * PAGE + offset


def value_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    return offset * size + j


def read_index(place: Buffer | ScalarParam | Const | None, name: str, upper: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
    """Use a scalar operand as an index."""
    assert isinstance(place, ScalarParam | Const)
    return let(name, cast(place, DType.I64), body, 0, upper)


# --- appending ---------------------------------------------------------------------------------------------------------


CACHE = "[layers, 2, pages, kv_heads, PAGE * size]"
TOKENS = "[tokens, heads, size]"


def _cache(args: tuple[Type, ...], index: int, heads: Dim | None, size: Dim | None) -> TensorType:
    """The annotation of the cache, whose pages hold vectors of this size."""
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
    """The annotation of the scales that an 8-bit cache needs and no other may have."""
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
    cache, k, v, slots = (operands.buffer(i) for i in range(4))
    new = Buffer("new_cache", cache.shape, cache.dtype)
    tokens, heads, size = k.shape
    scales = operands.buffer(5) if operands.has(5) else None
    new_scales = None if scales is None else Buffer("new_scales", scales.shape, scales.dtype)

    def at_slots(body: Callable[[Dim, Dim, Dim], Stmt]) -> Stmt:
        """For every token: its number, its page, its place there."""
        return loops((tokens,), lambda t: let("slot", cast(load(slots, t), DType.I64), lambda s: body(t, s // PAGE, s % PAGE)))

    def measure(scales: Buffer, layer: Dim, which: int, source: Buffer) -> Stmt:
        def scale(t: Dim, h: Dim) -> Scalar:
            largest = reduce(ReduceFn.MAX, (size,), lambda r: apply(Fn.ABS, cast(load(source, t, h, r), F32)))
            return cast(apply(Fn.DIV, largest, const(127.0, F32)), scales.dtype)

        def one(t: Dim, page: Dim, offset: Dim) -> Stmt:
            return loops((heads,), lambda h: store(scales, (layer, Dim.of(which), page, h, offset), scale(t, h)))

        return at_slots(one)

    def copy(layer: Dim, which: int, source: Buffer, index: Callable[[Dim, Dim, Dim], Dim]) -> Stmt:
        def held(t: Dim, page: Dim, offset: Dim, h: Dim, j: Dim) -> Scalar:
            value = load(source, t, h, j)
            if new_scales is None:
                return cast(value, cache.dtype)
            scale = cast(load(new_scales, layer, which, page, h, offset), F32)
            return cast(apply(Fn.ROUND, apply(Fn.DIV, cast(value, F32), scale)), cache.dtype)

        def one(t: Dim, page: Dim, offset: Dim) -> Stmt:
            def element(h: Dim, j: Dim) -> Stmt:
                return store(new, (layer, Dim.of(which), page, h, index(size, offset, j)), held(t, page, offset, h, j))

            return loops((heads, size), element)

        return at_slots(one)

    def both(layer: Dim) -> Stmt:
        copies = (copy(layer, 0, k, key_index), copy(layer, 1, v, value_index))
        if new_scales is None:
            return seq(*copies)
        return seq(measure(new_scales, layer, 0, k), measure(new_scales, layer, 1, v), *copies)

    wanted = {0: (cache.shape[0], Dim.of(2), cache.shape[2], heads, size * PAGE), 2: k.shape, 3: (tokens,)}
    body = read_index(operands.places[4], "layer", cache.shape[0] - 1, both)
    if new_scales is None:
        return Nest((new,), body, inplace=(0,), checks=unproved(operands, wanted))
    wanted[5] = (*cache.shape[:4], Dim.of(PAGE))
    return Nest((new, new_scales), body, inplace=(0, 5), checks=unproved(operands, wanted))


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
    """The formula itself: scores, their maximum, the sum of exponentials, the weighted values. The scheduler has a version that walks
    the pages once; this one is what it must compute."""
    out = output(operands)
    q, cache, tables, seq_ids, positions = (operands.buffer(i) for i in range(5))
    scales = operands.buffer(6) if cache.dtype is DType.I8 else None
    place_of_sinks = 6 if scales is None else 7
    sinks = operands.buffer(place_of_sinks) if operands.has(place_of_sinks) else None
    attrs = operands.attrs
    tokens, heads, size = q.shape
    group = heads // cache.shape[3]
    most = tables.shape[1] * PAGE  # positions that a page table can hold
    scores = Buffer("scores", (tokens, heads, most), F32)
    top, total = Buffer("top", (tokens, heads), F32), Buffer("total", (tokens, heads), F32)

    def first(position: Dim) -> Dim:
        window = attrs["window"]
        return dim_max(0, position - (window - 1)) if window else Dim.of(0)

    def held(layer: Dim, which: int, page: Dim, h: Dim, offset: Dim, index: Dim) -> Scalar:
        """An element of the cache, decoded."""
        value = cast(load(cache, layer, which, page, h // group, index), F32)
        if scales is None:
            return value
        return apply(Fn.MUL, value, cast(load(scales, layer, which, page, h // group, offset), F32))

    def score(layer: Dim, t: Dim, h: Dim, p: Dim, page: Dim) -> Scalar:
        def term(r: Dim) -> Scalar:
            key = held(layer, 0, page, h, p % PAGE, key_index(size, p % PAGE, r))
            return apply(Fn.MUL, cast(load(q, t, h, r), F32), key)

        dot = reduce(ReduceFn.SUM, (size,), term)
        return capped(apply(Fn.MUL, dot, const(attrs["scale"], F32)), attrs["softcap"])

    def weight(t: Dim, h: Dim, p: Dim) -> Scalar:
        return apply(Fn.EXP, apply(Fn.SUB, load(scores, t, h, p), load(top, t, h)))

    def per_token(layer: Dim, t: Dim) -> Stmt:
        def body(position: Dim, s: Dim) -> Stmt:
            low = first(position)
            count = position + 1 - low

            def page_of(p: Dim, then: Any) -> Stmt:
                return let("page", cast(load(tables, s, p // PAGE), DType.I64), then)

            fill_scores = loops(
                (heads, count),
                lambda h, i: page_of(i + low, lambda page: store(scores, (t, h, i + low), score(layer, t, h, i + low, page))),
            )

            def maximum(h: Dim) -> Stmt:
                m = reduce(ReduceFn.MAX, (count,), lambda i: load(scores, t, h, i + low))
                m = m if sinks is None else apply(Fn.MAX, m, cast(load(sinks, h), F32))
                return store(top, (t, h), m)

            def exponentials(h: Dim) -> Stmt:
                total_weight: Scalar = reduce(ReduceFn.SUM, (count,), lambda i: weight(t, h, i + low))
                if sinks is not None:
                    own = apply(Fn.EXP, apply(Fn.SUB, cast(load(sinks, h), F32), load(top, t, h)))
                    total_weight = apply(Fn.ADD, total_weight, own)
                return store(total, (t, h), total_weight)

            zeroed = loops((heads, size), lambda h, j: store(sums, (t, h, j), const(0.0, F32)))

            def accumulate(i: Dim) -> Stmt:
                def add(page: Dim) -> Stmt:
                    def one(h: Dim, j: Dim) -> Stmt:
                        offset = (i + low) % PAGE
                        value = held(layer, 1, page, h, offset, value_index(size, offset, j))
                        return store(sums, (t, h, j), apply(Fn.ADD, load(sums, t, h, j), apply(Fn.MUL, weight(t, h, i + low), value)))

                    return loops((heads, size), one)

                return page_of(i + low, add)

            return seq(
                fill_scores,
                loops((heads,), maximum),
                loops((heads,), exponentials),
                zeroed,
                loops((count,), accumulate),
            )

        position = cast(load(positions, t), DType.I64)
        sequence = cast(load(seq_ids, t), DType.I64)
        return let("position", position, lambda pos: let("s", sequence, lambda s: body(pos, s)))

    sums = Buffer("sums", (tokens, heads, size), F32)
    result = fill(out, lambda t, h, j: cast(apply(Fn.DIV, load(sums, t, h, j), load(total, t, h)), out.dtype))
    walk = read_index(operands.places[5], "layer", cache.shape[0] - 1, lambda layer: loops((tokens,), lambda t: per_token(layer, t)))
    body = seq(walk, result)
    for buffer in (scores, top, total, sums):
        body = Allocate(buffer, body)
    wanted = {1: (*cache.shape[:1], Dim.of(2), *cache.shape[2:4], size * PAGE), 3: (tokens,), 4: (tokens,)}
    if scales is not None:
        wanted[6] = (*cache.shape[:1], Dim.of(2), *cache.shape[2:4], Dim.of(PAGE))
    if sinks is not None:
        wanted[place_of_sinks] = (heads,)
    kept = {"attention": [attrs["scale"], attrs["window"], attrs["softcap"]]}
    return Nest((out,), body, checks=unproved(operands, wanted), attrs=kept)


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
