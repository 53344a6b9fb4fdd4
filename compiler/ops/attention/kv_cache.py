"""The paged cache of keys and values: its layout, and the operators that append to it.

The cache of a whole model is one tensor, `[layers, 2, pages, kv_heads, PAGE * size]`; the second axis has keys, then values. In a page

    keys     are [size, PAGE]     tokens innermost: one vector holds the same element of all keys of a page
    values   are [PAGE, size]     elements innermost: one vector holds part of one value

If each value is the beginning of its key, the second axis has length 1, and only keys are stored.

Position `p` of a sequence is in page `page_tables[sequence, p // PAGE]` at offset `p % PAGE`. The layer is an operand of the operators that
read or write the cache, so that all layers share one kernel.

An 8-bit cache has a scale per token and head, `[layers, 2 or 1, pages, kv_heads, PAGE]`. For an element x, the cache stores `round(x /
scale)`. A scale maps the largest magnitude of the elements that share the scale to 127. An operator that appends skips tokens whose slot
does not exist.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Const, Scalar, ScalarParam
from compiler.ir.loops.write import Array, Kernel, cast, largest_magnitude, round_half_even
from compiler.ir.prove import prove_divisible
from compiler.ir.types import ObjectType, ScalarType, TensorType, TupleType, Type
from compiler.ops.index import inside
from compiler.ops.indices import Extent, checked, skipped
from compiler.ops.operands import agree, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, Place, define
from runtime.cache_groups import PAGE_SIZE as PAGE

KEYS, VALUES = 0, 1  # indices on the second axis of the cache

F32, LANES = DType.F32, 16


def key_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    """Return the index, within a page, of element `j` of the key at `offset`. The index does not depend on `size`, the number of elements
    of a key; it is a parameter because `value_index` needs it, and `_write_cache` calls both functions alike."""
    return j * PAGE + offset


def value_index(size: Dim, offset: Dim, j: Dim) -> Dim:
    """Return the index, within a page, of element `j` of the value at `offset`. A value has `size` elements."""
    return offset * size + j


def bound_layer(k: Kernel, layer: Scalar, cache: Buffer) -> Dim:
    """Bind the operand `layer` as an index of the first axis of the cache, and return the index."""
    return k.let("layer", cast(layer, DType.I64), cache.shape[0] - 1)


def layer_operand(place: Place | None) -> ScalarParam | Const:
    assert isinstance(place, ScalarParam | Const)
    return place


# --- appending ---------------------------------------------------------------------------------------------------------


CACHE = "[layers, 2 or 1, pages, kv_heads, PAGE * size]"
TOKENS = "[tokens, heads, size]"


def cache_operand(args: tuple[Type, ...], index: int, halves: int, heads: Dim | None, size: Dim | None) -> TensorType:
    """Return the annotation of the cache, operand `index`. Raise AnnotationError if it is no tensor of rank 5, or is proved not to have
    `halves` entries on its second axis and pages for `heads` heads of `size` elements. `halves` is 2 for keys and values, and 1 for keys
    alone. If `heads` or `size` is None, that number is not checked."""
    cache = tensor_operand(args, index, "cache", ndim=5, layout=CACHE)
    if cache.shape is not None:
        agree(Dim.of(halves), cache.shape[1], "dimension 1 of cache")
        if heads is not None:
            agree(heads, cache.shape[3], "the number of kv heads of cache")
        if size is not None:
            agree(size * PAGE, cache.shape[4], "the number of elements per head in a page of cache")
    return cache


def check_layer(type_: Type) -> None:
    if not isinstance(type_, ScalarType | ObjectType) or (isinstance(type_, ScalarType) and type_.dtype and not type_.dtype.is_int):
        raise AnnotationError(f"layer is {type_}, expected an integer")


def check_per_token(args: tuple[Type, ...], index: int, name: str, tokens: Dim | None) -> None:
    type_ = wants_int(tensor_operand(args, index, name, ndim=1, layout="[tokens]"), name)
    if type_.shape is not None and tokens is not None:
        agree(tokens, type_.shape[0], f"the length of {name}")


def scales_operand(args: tuple[Type, ...], index: int, cache: TensorType) -> Type:
    """Return the annotation of operand `index`, the scales of the cache, or ObjectType if there are none. An i8 cache needs scales, and no
    other cache may have them."""
    if len(args) <= index:
        if cache.dtype is DType.I8:
            raise AnnotationError("cache is i8, and its scales are missing; expected one scale per token and head")
        return ObjectType()
    scales = wants_float(tensor_operand(args, index, "scales", ndim=5, layout="[layers, 2 or 1, pages, kv_heads, PAGE]"), "scales")
    if cache.dtype not in (None, DType.I8):
        raise AnnotationError(f"scales are given for a cache of {cache.dtype}; expected scales only for i8")
    if cache.shape is not None and scales.shape is not None:
        for i, (wanted, given) in enumerate(zip((*cache.shape[:4], Dim.of(PAGE)), scales.shape, strict=True)):
            agree(wanted, given, f"dimension {i} of scales")
    return scales


def _append_type(args: tuple[Type, ...], names: str) -> Type:
    """Deduce the annotation of the cache after the append, and of its scales if there are any. `names` has a letter for each operand that
    is appended: "kv" or "k"."""
    given = [wants_float(tensor_operand(args, 1 + i, n, ndim=3, layout=TOKENS), n) for i, n in enumerate(names)]
    k, v = given[0], given[-1]
    for i, (wanted, found) in enumerate(zip(k.shape or (), v.shape or k.shape or (), strict=True)):
        agree(wanted, found, f"dimension {i} of v")
    tokens, heads, size = k.shape or (None, None, None)
    slots = 1 + len(names)
    check_per_token(args, slots, "slots", tokens)
    check_layer(args[slots + 1])
    cache = cache_operand(args, 0, len(names), heads, size)
    scales = scales_operand(args, slots + 2, cache)
    return cache if len(args) == slots + 2 else TupleType((cache, scales))


def _append_nest(operands: Operands, names: str) -> Nest:
    """Write the operands `names`, each [tokens, kv_heads, size], to the slots of the tokens; slot = page * PAGE + offset."""
    kernel, at = Kernel(), 1 + len(names)
    held, *sources, slots = (operands.buffer(i) for i in range(at + 1))
    cache = kernel.array(Buffer("new_cache", held.shape, held.dtype))
    tokens, heads, size = sources[0].shape
    wanted = {0: (held.shape[0], Dim.of(len(names)), held.shape[2], heads, size * PAGE), at: (tokens,)}
    wanted |= {1 + i: sources[0].shape for i in range(1, len(names))}
    tops = _lane_tops(kernel, names, sources) if operands.has(at + 2) else []
    layer = bound_layer(kernel, layer_operand(operands.places[at + 1]), cache.buffer)
    if not tops:
        _write_cache(kernel, layer, cache, None, sources, slots)
        return Nest((cache.buffer,), kernel.body(), inplace=(0,), checks=unproved(operands, wanted))
    held_scales = operands.buffer(at + 2)
    scales = kernel.array(Buffer("new_scales", held_scales.shape, held_scales.dtype))
    wanted[at + 2] = (*held.shape[:4], Dim.of(PAGE))
    _write_scales(kernel, layer, scales, tops, slots)
    _write_cache(kernel, layer, cache, scales, sources, slots)
    return Nest((cache.buffer, scales.buffer), kernel.body(), inplace=(0, at + 2), checks=unproved(operands, wanted))


@contextmanager
def _each_slot(kernel: Kernel, slots: Buffer, pages: Dim) -> Generator[tuple[Dim, Dim, Dim]]:
    """Loop over the tokens whose slot exists. Yield the token, the page of its slot and the offset in the page."""
    with kernel.nest(slots.shape) as (t,):
        given = kernel.array(slots)[t]
        with kernel.when(inside(given, pages * PAGE)):
            slot = kernel.let("slot", cast(given, DType.I64), pages * PAGE - 1)
            yield t, slot // PAGE, slot % PAGE


def _lane_tops(kernel: Kernel, names: str, sources: Sequence[Buffer]) -> list[Array]:
    """Return an array [tokens, heads, lanes] for each of the sources: the keys and, if they are given, the values. Entry `lane` is the
    largest magnitude of elements `lane`, `lane + lanes`, `lane + 2 * lanes`, ... of a key or value. `names` has a letter per source."""
    tokens, heads, size = sources[0].shape
    lanes = next(lanes for lanes in (LANES, 8, 4, 2, 1) if prove_divisible(size, lanes))
    found = [kernel.workspace(f"{name}_tops", tokens, heads, lanes) for name in names]
    for tops, x in zip(found, kernel.arrays(*sources), strict=True):
        with kernel.nest((tokens, heads, Dim.of(lanes))) as (t, h, lane):
            tops[t, h, lane] = largest_magnitude(size // lanes, partial(_of_lane, x, t, h, lanes, lane))
    return found


def _of_lane(x: Array, t: Dim, h: Dim, lanes: int, lane: Dim, r: Dim) -> Scalar:
    return cast(x[t, h, r * lanes + lane], F32)


def _write_scales(kernel: Kernel, layer: Dim, scales: Array, tops: Sequence[Array], slots: Buffer) -> None:
    """Write the scales of the keys, then those of the values if they are given, to the slots of the tokens in `scales`. `tops` has an array
    [tokens, heads, lanes] for the keys, and one for the values if they are given: the largest magnitude of each lane."""
    for which, of_lanes in enumerate(tops):
        _, heads, lanes = of_lanes.shape
        with _each_slot(kernel, slots, scales.shape[2]) as (t, page, offset), kernel.nest((heads,)) as (h,):
            top = largest_magnitude(lanes, partial(_at, of_lanes, t, h))
            scales[layer, which, page, h, offset] = cast(top / 127.0, scales.dtype)


def _at(tops: Array, t: Dim, h: Dim, lane: Dim) -> Scalar:
    return tops[t, h, lane]


def _write_cache(kernel: Kernel, layer: Dim, cache: Array, scales: Array | None, sources: Sequence[Buffer], slots: Buffer) -> None:
    """Write the keys, then the values if they are given, to the slots of the tokens in the cache. With `scales`, write them divided by
    their scales and rounded."""
    for which, (x, index) in enumerate(zip(kernel.arrays(*sources), (key_index, value_index), strict=False)):
        _, heads, size = x.shape
        with _each_slot(kernel, slots, cache.shape[2]) as (t, page, offset), kernel.nest((heads, size)) as (h, j):
            value: Scalar = x[t, h, j]
            if scales is not None:
                value = round_half_even(cast(value, F32) / cast(scales[layer, which, page, h, offset], F32))
            cache[layer, which, page, h, index(size, offset, j)] = cast(value, cache.dtype)


def _append_numpy(cache: Any, sources: Sequence[Any], slots: Any, layer: Any, scales: Any) -> Any:
    cache, size = cache.copy(), sources[0].shape[2]
    wide = slots.astype(np.int64)
    kept = (wide >= 0) & (wide < cache.shape[2] * PAGE)
    slots, sources = wide[kept], [x[kept] for x in sources]
    pages = slots // PAGE
    scales = None if scales is None else scales.copy()
    for which, x in enumerate(sources):
        if scales is not None:
            scale = np.abs(x.astype(np.float32)).max(-1, initial=0.0) / np.float32(127)  # [tokens, heads]
            scales[layer, which, pages, :, slots % PAGE] = scale
            with np.errstate(invalid="ignore"):
                x = np.nan_to_num(np.rint(x.astype(np.float32) / scale[..., None])).astype(np.int8)
        for row, page, offset in zip(x.astype(cache.dtype), pages, slots % PAGE, strict=True):
            held = cache[layer, which, page]
            if which == KEYS:
                held.reshape(len(held), size, PAGE)[:, :, offset] = row
            else:
                held.reshape(len(held), PAGE, size)[:, offset, :] = row
    return cache if scales is None else (cache, scales)


SLOTS, LAYER = skipped(Extent("cache", 2, PAGE)), checked(Extent("cache"))
KV_APPEND = define(
    "kv_append",
    "cache, k, v, slots, layer, scales?",
    lambda args, _: _append_type(args, "kv"),
    lambda cache, k, v, slots, layer, scales=None: _append_numpy(cache, (k, v), slots, layer, scales),
    lambda operands: _append_nest(operands, "kv"),
    indices={"slots": SLOTS, "layer": LAYER},
)
KEY_APPEND = define(
    "key_append",
    "cache, k, slots, layer, scales?",
    lambda args, _: _append_type(args, "k"),
    lambda cache, k, slots, layer, scales=None: _append_numpy(cache, (k,), slots, layer, scales),
    lambda operands: _append_nest(operands, "k"),
    indices={"slots": SLOTS, "layer": LAYER},
)
