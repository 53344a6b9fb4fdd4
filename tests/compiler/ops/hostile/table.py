"""One row per operator: how to draw a call of it. A new operator gets a row here; `tests/compiler/ops/test_hostile.py` fails without it.

A row states a valid call. The methods of `Draw` make its sizes, indices and attributes hostile.
"""

from __future__ import annotations

from math import prod

import numpy as np

from compiler.ir.blocks import BLOCKS, PARTS
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom
from compiler.machine.formats import PANELS
from runtime.cache_groups import PAGE_SIZE as PAGE
from runtime.sampling import Number, Setting
from tests.compiler.ops.hostile.draws import FLOATS, INTEGERS, Draw, row

BOOL, F32, BF16, I8, U8, I32, I64 = DType.BOOL, DType.F32, DType.BF16, DType.I8, DType.U8, DType.I32, DType.I64
F16, I16 = DType.F16, DType.I16
NUMBERS = [*FLOATS, *INTEGERS]
ANY = [*NUMBERS, BOOL]


def _shape(draw: Draw, least: int = 0, most: int = 3) -> list[int]:
    return [draw.size() for _ in range(draw.random.randint(least, most))]


def _axis(draw: Draw, shape: list[int]) -> int:
    return draw.random.randrange(-len(shape), len(shape)) if shape else 0


def _axes(draw: Draw, shape: list[int]) -> list[int]:
    return draw.random.sample(range(len(shape)), draw.random.randint(0, len(shape)))


# --- elementwise ---------------------------------------------------------------------------------------------------------


@row("exp log sqrt rsqrt tanh erf sin cos floor round sigmoid silu gelu gelu_tanh")
def _of_floats(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw)))


@row("negative abs relu")
def _of_numbers(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw), NUMBERS))


@row("logical_not")
def _inverted(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw), [BOOL, *INTEGERS]))


def _operands(draw: Draw, count: int, dtypes: list[DType]) -> None:
    shape, dtype = _shape(draw), draw.one_of(dtypes)
    inner = [[n if draw.chance(0.7) else 1 for n in shape[draw.random.randint(0, len(shape)) :]] for _ in range(count - 1)]
    operands: list[Atom] = [draw.tensor(shape, dtype), *(draw.tensor(s, dtype) for s in inner)]
    if count > 1 and dtype is not BOOL and draw.chance(0.2):
        operands[-1] = draw.scalar(2)
    draw.call(*operands)


@row("add subtract multiply minimum maximum less less_equal greater greater_equal equal not_equal")
def _arithmetic(draw: Draw) -> None:
    _operands(draw, 2, NUMBERS)


@row("divide power")
def _quotient(draw: Draw) -> None:
    _operands(draw, 2, FLOATS)


@row("floor_divide modulo")
def _whole_quotient(draw: Draw) -> None:
    _operands(draw, 2, INTEGERS)


@row("logical_and logical_or logical_xor")
def _bits(draw: Draw) -> None:
    _operands(draw, 2, [BOOL, *INTEGERS])


@row("clip")
def _clip(draw: Draw) -> None:
    _operands(draw, 3, NUMBERS)


@row("where")
def _where(draw: Draw) -> None:
    shape, dtype = _shape(draw), draw.one_of(ANY)
    draw.call(draw.tensor(shape, BOOL), draw.tensor(shape, dtype), draw.tensor(shape[1:], dtype))


@row("cast")
def _cast(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw), ANY), dtype=str(draw.one_of(list(DType))))


# --- reductions and order ------------------------------------------------------------------------------------------------


@row("sum prod max min")
def _fold(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape, NUMBERS), axes=draw.one_of([None, _axes(draw, shape)]), keepdims=draw.chance(0.4))


@row("mean")
def _mean(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape), axes=draw.one_of([None, _axes(draw, shape)]), keepdims=draw.chance(0.4))


@row("any all")
def _fold_bools(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape, BOOL), axes=draw.one_of([None, _axes(draw, shape)]), keepdims=draw.chance(0.4))


@row("argmax argmin")
def _extreme(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape, NUMBERS), axis=_axis(draw, shape), keepdims=draw.chance(0.4))


@row("cumsum")
def _cumsum(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape, NUMBERS), axis=_axis(draw, shape))


@row("sort argsort")
def _sort(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape, ANY), axis=_axis(draw, shape), descending=draw.chance(0.5))


@row("top_k")
def _top_k(draw: Draw) -> None:
    shape = _shape(draw, 1)
    axis = _axis(draw, shape)
    draw.call(draw.tensor(shape, NUMBERS), k=draw.place(min(2, shape[axis])), axis=axis, largest=draw.chance(0.5))


@row("softmax log_softmax")
def _softmax(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 1)))


@row("rms_norm")
def _rms_norm(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape), draw.tensor(shape[-1:]), eps=1e-5, weight_offset=draw.one_of([0.0, 1.0]))


@row("layer_norm")
def _layer_norm(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape), *(draw.tensor(shape[-1:]) for _ in range(draw.size(1, 2))), eps=1e-5)


# --- shapes and views ----------------------------------------------------------------------------------------------------


@row("reshape")
def _reshape(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape, ANY), draw.shape(draw.one_of([[prod(shape)], [1, *shape], [*shape[:-2], prod(shape[-2:])]])))


@row("expand_dims")
def _expand_dims(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape, ANY), axes=[draw.random.randint(0, len(shape))])


@row("squeeze")
def _squeeze(draw: Draw) -> None:
    shape = [1, *_shape(draw)]
    draw.call(draw.tensor(shape, ANY), axes=[0])


@row("broadcast_to")
def _broadcast_to(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor([n if draw.chance(0.6) else 1 for n in shape], ANY), draw.shape([*_shape(draw, 0, 1), *shape]))


@row("permute_dims")
def _permute_dims(draw: Draw) -> None:
    shape = _shape(draw)
    draw.call(draw.tensor(shape, ANY), axes=draw.one_of([None, draw.random.sample(range(len(shape)), len(shape))]))


@row("flip")
def _flip(draw: Draw) -> None:
    shape = _shape(draw, 1)
    draw.call(draw.tensor(shape, ANY), axes=_axes(draw, shape))


@row("slice")
def _slice(draw: Draw) -> None:
    shape = _shape(draw, 1)
    axis, end = _axis(draw, shape), draw.one_of([None, draw.place(4)])
    draw.call(draw.tensor(shape, ANY), axis=axis, begin=draw.place(1), end=end, stride=draw.size(1, 1, 2, 3))


@row("split")
def _split(draw: Draw) -> None:
    shape = _shape(draw, 1)
    axis = _axis(draw, shape)
    draw.call(draw.tensor(shape, ANY), axis=axis, sizes=draw.places(draw.one_of([[shape[axis]], [0, shape[axis]], [shape[axis] // 2] * 2])))


@row("concat")
def _concat(draw: Draw) -> None:
    shape, dtype = _shape(draw, 1), draw.one_of(ANY)
    draw.call(*(draw.tensor(shape, dtype) for _ in range(draw.size(1, 2, 3))), axis=_axis(draw, shape))


@row("full")
def _full(draw: Draw) -> None:
    draw.call(draw.shape(_shape(draw)), draw.scalar(3), dtype=str(draw.one_of(NUMBERS)))


@row("arange")
def _arange(draw: Draw) -> None:
    draw.call(start=draw.place(1), stop=draw.place(5), step=draw.size(1, 2), dtype=str(draw.one_of([I64, I32, F32])))


@row("uniform")
def _uniform(draw: Draw) -> None:
    draw.call(draw.shape(_shape(draw)), draw.scalar(3))


@row("shape_of")
def _shape_of(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw), ANY))


@row("tensor_to_shape")
def _tensor_to_shape(draw: Draw) -> None:
    draw.call(draw.indices([draw.size(0, 1, 2)], 41, I64))


@row("shape_to_tensor")
def _shape_to_tensor(draw: Draw) -> None:
    draw.call(draw.shape(_shape(draw)))


@row("pad")
def _pad(draw: Draw) -> None:
    shape = _shape(draw)
    before, after = (draw.places([draw.size(0, 0, 1, 3) for _ in shape]) for _ in range(2))
    draw.call(draw.tensor(shape, NUMBERS), before=before, after=after, value=draw.one_of([0, 1]))


@row("tril")
def _tril(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 2), ANY), k=draw.place(1))


@row("unique nonzero")
def _counted_by_data(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 1), ANY))


# --- indices -------------------------------------------------------------------------------------------------------------


@row("take")
def _take(draw: Draw) -> None:
    shape = _shape(draw, 1)
    axis = _axis(draw, shape)
    draw.call(draw.tensor(shape, ANY), draw.indices(_shape(draw, 0, 2), shape[axis]), axis=axis)


@row("gather")
def _gather(draw: Draw) -> None:
    shape = _shape(draw, 1)
    axis, x = _axis(draw, shape), draw.tensor(shape, ANY)
    extent = shape[axis]
    shape[axis] = draw.size()
    draw.call(x, draw.indices(shape, extent), axis=axis)


@row("scatter scatter_inplace")
def _scatter(draw: Draw) -> None:
    shape, dtype = _shape(draw, 1), draw.one_of(ANY)
    axis, x = _axis(draw, shape), draw.tensor(shape, dtype)
    extent = shape[axis]
    shape[axis] = draw.size()
    draw.call(x, draw.indices(shape, extent), draw.tensor(shape, dtype), axis=axis)


@row("embedding")
def _embedding(draw: Draw) -> None:
    rows = draw.size()
    draw.call(draw.tensor([rows, draw.size()]), draw.indices(_shape(draw, 0, 2), rows))


@row("all_gather")
def _all_gather(draw: Draw) -> None:
    shape, dtype = _shape(draw, 1), draw.one_of(ANY)
    draw.call(*(draw.tensor(shape, dtype) for _ in range(draw.size(1, 2, 4))), axis=_axis(draw, shape))


@row("rank_embedding")
def _rank_embedding(draw: Draw) -> None:
    rows, columns, dtype, num_ranks = draw.size(1, 2, 5), draw.size(), draw.one_of(ANY), draw.size(1, 2, 4)
    tables = [draw.tensor([rows, columns], dtype) for _ in range(num_ranks)]
    draw.call(draw.indices(_shape(draw, 0, 2), rows * num_ranks), *tables, size=rows * num_ranks)


@row("rope_angles")
def _rope_angles(draw: Draw) -> None:
    draw.call(draw.indices(_shape(draw, 0, 2), 41), draw.tensor([draw.size()], F32), scale=draw.one_of([1.0, 0.5]))


@row("rope")
def _rope(draw: Draw) -> None:
    tokens, pairs = draw.size(), draw.size(0, 1, 2, 4)
    tables = (draw.tensor([tokens, pairs], F32) for _ in range(2))
    draw.call(draw.tensor([tokens, draw.size(1, 3), 2 * pairs + draw.size(0, 0, 3)]), *tables, interleaved=draw.chance(0.5))


# --- products ------------------------------------------------------------------------------------------------------------


@row("linear")
def _linear(draw: Draw) -> None:
    shape, size = _shape(draw, 1), draw.size()
    bias = [draw.tensor([size])] if draw.chance(0.3) else []
    draw.call(draw.tensor(shape), draw.tensor([size, shape[-1]]), *bias, out_dtype=draw.one_of([None, "f32", "bf16"]), tolerates=None)


@row("matmul")
def _matmul(draw: Draw) -> None:
    batch, m, k, n = _shape(draw, 0, 1), draw.size(), draw.size(), draw.size()
    flips, dtype = (draw.chance(0.3), draw.chance(0.3)), draw.one_of(NUMBERS)
    a = draw.tensor([*batch, k, m] if flips[0] else [*batch, m, k], dtype)
    b = draw.tensor([*batch, n, k] if flips[1] else [*batch, k, n], dtype)
    draw.call(a, b, transpose_a=flips[0], transpose_b=flips[1], out_dtype=None)


@row("quantize")
def _quantize(draw: Draw) -> None:
    groups, group = draw.size(0, 1, 2), draw.one_of([0, 2, 4])
    shape = [*_shape(draw, 0, 1), groups * (group or 4)]
    draw.call(draw.tensor(shape), bits=draw.one_of([8, 4]), group=group, symmetric=draw.chance(0.5), dtype=str(draw.one_of(FLOATS)))


@row("dequantize")
def _dequantize(draw: Draw) -> None:
    bits, group, count, rows = draw.one_of([8, 8, 4, 6]), draw.one_of([0, 2, 4]), draw.size(0, 1, 2), _shape(draw, 0, 1)
    length = count * (group or 4)
    kind = draw.one_of(["int", "int", "int", "e2m1", "iq4", "iq2"] if bits == 4 else ["int", "int", "e4m3"] if bits == 8 else ["int"])
    q = draw.tensor([*rows, length // 2 if bits == 4 else length], U8 if bits == 4 else DType.E4M3 if kind == "e4m3" else I8)
    scales = [*rows, count if group else 1]
    zero = [draw.tensor(scales, draw.one_of([q.type.dtype, F32]))] if kind == "int" and draw.chance(0.4) else []  # type: ignore[union-attr]
    shifted = bool(zero) and draw.chance(0.5)
    draw.call(q, draw.tensor(scales), *zero, bits=bits, group=group, dtype=str(draw.one_of(FLOATS)), shifted=shifted, kind=kind)


def _groups(draw: Draw, *, weighs: bool) -> None:
    rows, groups, group, shifted = draw.size(), draw.size(0, 1, 2), draw.one_of([2, 4]), draw.chance(0.5)
    wide, scales = [rows, groups * group], [rows, groups]
    weights = [draw.tensor(wide, F32)] if weighs else []
    pair = [draw.tensor(scales, F32) for _ in range(1 + shifted)]
    bits = draw.one_of([4, 6])
    kind = draw.one_of(["int", "iq4"]) if bits == 4 and not shifted else "int"
    draw.call(draw.tensor(wide, F32), *weights, *pair, bits=bits, group=group, shifted=shifted, kind=kind)


@row("refine_groups")
def _refine_groups(draw: Draw) -> None:
    _groups(draw, weighs=True)


@row("group_errors")
def _group_errors(draw: Draw) -> None:
    _groups(draw, weighs=True)


@row("round_groups")
def _round_groups(draw: Draw) -> None:
    _groups(draw, weighs=False)


@row("quantize_rows")
def _quantize_rows(draw: Draw) -> None:
    groups, group, bits = draw.size(0, 1, 2), draw.one_of([0, 4, 8]), draw.one_of([8, 16])
    shape = [*_shape(draw, 0, 1), groups * (group or 4)]
    more = {"sums": draw.chance(0.5), "cap": draw.one_of([0.0, 1.0, 4.0]) if bits == 16 else 0.0}
    draw.call(draw.tensor(shape), bits=bits, group=group, dtype=draw.one_of(["i8", "i16"]), **more)


@row("row_planes")
def _row_planes(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 1)))


@row("panel_integers")
def _panel_integers(draw: Draw) -> None:
    format = draw.one_of([f for f in PANELS.values() if f.bits in (4, 8)])
    per_byte = 8 // format.bits
    shape = [*_shape(draw, 0, 1), draw.size(), draw.size(0, 1, 2) * format.depth // per_byte]
    draw.call(draw.tensor(shape, U8 if format.bits == 4 else I8), format=format.name, columns=draw.size(1, 4, 8))


@row("unpack_blocks")
def _unpack_blocks(draw: Draw) -> None:
    format = draw.one_of(list(BLOCKS.values()))
    part = draw.one_of([part for part in PARTS if format.part(part) is not None])
    draw.call(draw.tensor([*_shape(draw, 0, 2), draw.size(0, 1, 2) * format.num_bytes], U8), format=format.name, part=part)


@row("panel_blocks")
def _panel_blocks(draw: Draw) -> None:
    format = draw.one_of(list(BLOCKS.values()))
    panels = draw.one_of([panels for panels in PANELS.values() if panels.bits == format.bits])
    blocks = draw.tensor([*_shape(draw, 0, 1), draw.size(), draw.size(0, 1, 2) * format.num_bytes], U8)
    draw.call(blocks, of=format.name, format=panels.name, columns=draw.size(1, 4, 8))


@row("look_up")
def _look_up(draw: Draw) -> None:
    format = draw.one_of(["", *PANELS])
    panels, size, groups = PANELS.get(format), draw.size(1, 3, 8), draw.size(1, 2)
    bits, kind = (draw.one_of([4, 8]), "int") if panels is None else (panels.bits, str(getattr(panels, "kind", "int")))
    length = groups * (panels.depth if panels else 2) * draw.size(1, 2)
    in_units, offset = draw.chance(0.3), draw.one_of(["", "shift"]) if kind == "int" else ""
    columns = draw.size(1, 4)

    def levels(count: int, dtype: DType) -> Atom:
        return draw.tensor([size, count] if panels is None else [-(-size // columns), count, columns], dtype)

    numbers = [size, length * bits // 8] if panels is None else [-(-size // columns), panels.lines(Dim.of(length)).const, 4 * columns]
    each = [levels(groups, I8 if in_units else F32), *([levels(1, F32)] if in_units else [])]
    draw.call(
        draw.indices(_shape(draw, 0, 2), size),
        draw.tensor(numbers, I8 if panels is None and bits == 8 else U8),
        *each,
        *(each if offset else []),
        size=size,
        length=length,
        bits=bits,
        kind=kind,
        format=format,
        in_units=in_units,
        offset=offset,
    )


@row("panel_scales")
def _panel_scales(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 2), [*FLOATS, I8]), columns=draw.size(1, 4, 8))


@row("panel_multipliers")
def _panel_multipliers(draw: Draw) -> None:
    draw.call(draw.tensor(_shape(draw, 2)), columns=draw.size(1, 4, 8))


def _integer_linear(draw: Draw, experts: list[int]) -> None:
    format = draw.one_of(list(PANELS.values()))
    rows = _shape(draw, 0, 2) if not experts else [draw.size()]
    planes = draw.size(1, 2 // format.rows.num_bytes)
    groups, columns, size = draw.size(1, 2, 4), draw.size(1, 4, 8), draw.size(1, 3, 8)
    length = groups * format.depth * draw.size(1, 2)
    panels, in_units, has_offset = -(-size // columns), draw.chance(0.2), draw.chance(0.2)
    weight_groups = 1 if draw.chance(0.2) and not in_units and not has_offset else groups

    def of_panels(*shape: int) -> list[int]:
        return [*experts, panels, *shape, columns]

    args = [
        draw.tensor([*rows, planes, length], format.rows),
        draw.tensor([*rows, groups], F32),
        draw.tensor([*rows, planes, groups], I32),
        draw.tensor([*experts, panels, length // format.depth, 4 * columns], U8),
        draw.tensor(of_panels(weight_groups), I8 if in_units else F32),
        *([draw.indices(rows, experts[0])] if experts else []),
        *([draw.tensor(of_panels(1), F32)] if in_units else []),
        *([draw.tensor([*rows, groups], F32), draw.tensor(of_panels(groups), I8 if in_units else F32)] if has_offset else []),
        *([draw.tensor(of_panels(1), F32)] if in_units and has_offset else []),
        *([draw.tensor([*experts, size], F32)] if draw.chance(0.3) else []),
    ]
    draw.call(*args, format=format.name, size=size, dtype="f32", centred=draw.chance(0.8), in_units=in_units, has_offset=has_offset)


@row("integer_linear")
def _integers(draw: Draw) -> None:
    _integer_linear(draw, [])


@row("expert_integer_linear")
def _expert_integers(draw: Draw) -> None:
    _integer_linear(draw, [draw.size(1, 2)])


def _widened_linear(draw: Draw, experts: list[int]) -> None:
    rows = _shape(draw, 0, 2) if not experts else [draw.size()]
    groups, columns, size = draw.size(1, 2), draw.size(1, 4, 8), draw.size(1, 3, 8)
    length, panels = groups * 8 * draw.size(1, 2), -(-size // columns)
    args = [
        draw.tensor([*rows, 2, length], I8),
        draw.tensor([*rows, 1], F32),
        draw.tensor([*rows, 1], BOOL),
        draw.tensor([*experts, panels, length // 8, 4 * columns], U8),
        draw.tensor([*experts, panels, groups, columns], I8),
        draw.tensor([*experts, panels, 1, columns], F32),
        *([draw.indices(rows, experts[0])] if experts else []),
        *([draw.tensor([*experts, size], F32)] if draw.chance(0.3) else []),
    ]
    draw.call(*args, size=size, dtype="f32")


@row("widened_linear")
def _widened(draw: Draw) -> None:
    _widened_linear(draw, [])


@row("expert_widened_linear")
def _expert_widened(draw: Draw) -> None:
    _widened_linear(draw, [draw.size(1, 2)])


# --- mixtures of experts -------------------------------------------------------------------------------------------------


@row("expert_linear")
def _expert_linear(draw: Draw) -> None:
    rows, experts, size, length = draw.size(), draw.size(), draw.size(), draw.size()
    bias = [draw.tensor([experts, size])] if draw.chance(0.3) else []
    args = draw.tensor([rows, length]), draw.tensor([experts, size, length]), draw.indices([rows], experts), *bias
    draw.call(*args, out_dtype=draw.one_of([None, "f32"]), tolerates=None)


@row("top_experts")
def _top_experts(draw: Draw) -> None:
    experts = draw.size(1, 2, 4, 8)
    draw.call(draw.tensor([draw.size(), experts]), k=draw.random.randint(1, experts))


@row("group_rows")
def _group_rows(draw: Draw) -> None:
    count = draw.size(1, 3, 8)
    draw.call(draw.indices([draw.size(), draw.size(1, 2)], count), count=count)


@row("sum_rows")
def _sum_rows(draw: Draw) -> None:
    tokens, k = draw.size(), draw.size(1, 2)
    y, shares = draw.tensor([tokens * k, draw.size()]), draw.tensor([tokens, k])
    draw.call(y, draw.indices([tokens, k], tokens * k), shares)


# --- attention -----------------------------------------------------------------------------------------------------------


@row("attention")
def _attention(draw: Draw) -> None:
    batch, heads, queries, keys, size = draw.size(0, 1, 2), draw.size(1, 2, 4), draw.size(), draw.size(), draw.size(0, 1, 4)
    q = draw.tensor([batch, heads * draw.size(1, 2, 3), queries, size])
    k, v = draw.tensor([batch, heads, keys, size]), draw.tensor([batch, heads, keys, draw.size(0, 1, 4)])
    mask = [draw.tensor([queries, keys], [BOOL, F32])] if draw.chance(0.4) else []
    attrs = {"causal": draw.chance(0.5), "window": draw.one_of([0, 0, 3]), "softcap": draw.one_of([0.0, 0.0, 5.0])}
    draw.call(q, k, v, *mask, scale=0.5, **attrs)


def _starts(draw: Draw, tokens: int) -> list[int]:
    """Return the first tokens of sequences that are not empty, and the number of tokens."""
    return sorted({0, tokens, *(draw.random.randint(0, tokens) for _ in range(2))})


@row("paged_attention")
def _paged_attention(draw: Draw) -> None:
    layers, pages, kv_heads, each, size = draw.size(1, 2), draw.size(1, 3), draw.size(1, 2), draw.size(1, 2), draw.size(1, 4, 16)
    tokens, seqs, per_seq, value_size = draw.size(), draw.size(1, 2), draw.size(1, 2), draw.one_of([0, 0, 0, size])
    dtype, halves = draw.one_of([F32, F32, BF16, I8]), 1 if value_size else 2
    cache = draw.tensor([layers, halves, pages, kv_heads, PAGE * size], dtype)
    tables = draw.indices([seqs, per_seq], pages, I32)
    of_tokens = draw.indices([tokens], seqs, I32), draw.indices([tokens], per_seq * PAGE, I32)
    scales = [draw.tensor([layers, halves, pages, kv_heads, PAGE], F32)] if dtype is I8 else []
    sinks = [draw.tensor([kv_heads * each])] if draw.chance(0.2) else []
    q, layer = draw.tensor([tokens, kv_heads * each, size]), draw.index(layers)
    attrs = {"window": draw.one_of([0, 0, 5]), "softcap": draw.one_of([0.0, 5.0]), "value_size": value_size, "exact": draw.chance(0.5)}
    draw.call(q, cache, tables, *of_tokens, layer, *scales, *sinks, scale=0.5, **attrs)


def _append(draw: Draw, names: int) -> None:
    layers, pages, heads, size, tokens = draw.size(1, 2), draw.size(1, 3), draw.size(1, 2), draw.size(0, 1, 4), draw.size()
    dtype = draw.one_of([F32, BF16, I8])
    cache = draw.tensor([layers, names, pages, heads, PAGE * size], dtype)
    appended = [draw.tensor([tokens, heads, size]) for _ in range(names)]
    first = draw.random.randrange(PAGE)
    slots = draw.listed([(first + t) % (pages * PAGE) for t in range(tokens)])
    scales = [draw.tensor([layers, names, pages, heads, PAGE], F32)] if dtype is I8 else []
    draw.call(cache, *appended, slots, draw.index(layers), *scales)


@row("kv_append")
def _kv_append(draw: Draw) -> None:
    _append(draw, 2)


@row("key_append")
def _key_append(draw: Draw) -> None:
    _append(draw, 1)


@row("ragged_attention")
def _ragged_attention(draw: Draw) -> None:
    tokens, heads, size = draw.size(), draw.size(1, 2), draw.size(0, 1, 4)
    starts = _starts(draw, tokens)
    ids = [sum(t >= s for s in starts[1:]) for t in range(tokens)]
    bias = [draw.tensor([heads, draw.size(1, 3, 5)])] if draw.chance(0.4) else []
    draw.call(*(draw.tensor([tokens, heads, size]) for _ in range(3)), draw.listed(ids), draw.listed(starts), *bias, scale=0.5)


@row("ragged_mean ragged_max")
def _pooled(draw: Draw) -> None:
    tokens = draw.size()
    draw.call(draw.tensor([tokens, draw.size()]), draw.listed(_starts(draw, tokens)))


# --- states --------------------------------------------------------------------------------------------------------------


@row("state_read")
def _state_read(draw: Draw) -> None:
    layers, pages = draw.size(1, 2), draw.size(1, 3)
    states = draw.tensor([layers, pages, draw.size()])
    draw.call(states, draw.indices([draw.size()], pages), draw.index(layers))


@row("state_write")
def _state_write(draw: Draw) -> None:
    layers, pages, size, count = draw.size(1, 2), draw.size(1, 3), draw.size(), draw.size()
    values, written = draw.tensor([count, size]), draw.indices([count], pages)
    draw.call(draw.tensor([layers, pages, size]), values, written, draw.index(layers))


@row("conv_taps")
def _conv_taps(draw: Draw) -> None:
    draw.call(draw.tensor([draw.size(), 1, draw.size(1, 4)]))


@row("causal_conv")
def _causal_conv(draw: Draw) -> None:
    tokens, size, taps = draw.size(), draw.size(), draw.size(1, 2, 4)
    starts = _starts(draw, tokens)
    ids = [sum(t >= s for s in starts[1:]) for t in range(tokens)]
    before = draw.tensor([len(starts) - 1, taps - 1, size])
    draw.call(draw.tensor([tokens, size]), draw.tensor([taps, size], F32), before, draw.listed(ids), draw.listed(starts))


@row("input_tails")
def _input_tails(draw: Draw) -> None:
    tokens, size = draw.size(), draw.size()
    starts = _starts(draw, tokens)
    ids = [sum(t >= s for s in starts[1:]) for t in range(tokens)]
    before, saved = draw.tensor([len(starts) - 1, draw.size(1, 3), size]), draw.indices([draw.size(0, 1, 2)], tokens)
    draw.call(draw.tensor([tokens, size]), before, draw.listed(ids), draw.listed(starts), saved)


@row("state_scan")
def _state_scan(draw: Draw) -> None:
    tokens, keys, each, key_size, size = draw.size(), draw.size(1, 2), draw.size(1, 2), draw.size(1, 2, 4), draw.size(1, 4, 8)
    layers, pages, heads = draw.size(1, 2), draw.size(1, 3), keys * each
    starts = _starts(draw, tokens)
    saved = sorted(draw.random.sample(range(tokens), min(tokens, 2)))
    qk = [draw.tensor([tokens, keys, key_size], F32) for _ in range(2)]
    of_tokens = [*qk, draw.tensor([tokens, heads, size], F32), draw.tensor([tokens, heads], F32)]
    lists = [
        draw.indices([len(starts) - 1], pages),
        draw.listed(starts),
        draw.listed(saved),
        draw.indices([len(saved)], pages),
    ]
    beta = [draw.tensor([tokens, heads], F32)] if draw.chance(0.5) else []
    states = draw.tensor([layers, pages, heads * size * key_size], F32)
    draw.call(states, *of_tokens, *lists, draw.index(layers), *beta)


# --- sampling ------------------------------------------------------------------------------------------------------------


@row("sample")
def _sample(draw: Draw) -> None:
    batch, vocab, rows = draw.size(1, 2), draw.size(1, 65), draw.size(0, 1, 2)
    numbers = draw.tensor([rows, len(Number)], F32, np.ones)
    settings = draw.indices([rows, len(Setting)], 4, I64)
    lists = []
    for kinds in ((F32,), (I32,)):
        count = draw.size(0, 1, 3)
        starts = draw.listed([0, *sorted(draw.random.randint(0, count) for _ in range(rows))], I32)
        lists += [starts, draw.indices([count], vocab, I32), *(draw.tensor([count], kind) for kind in kinds)]
    masks = draw.tensor([4, -(-vocab // 32)], I32)
    draw.call(draw.tensor([batch, vocab], F32), draw.indices([rows], batch, I32), numbers, settings, *lists, masks)


@row("token_logprobs")
def _token_logprobs(draw: Draw) -> None:
    batch, vocab, rows = draw.size(1, 2), draw.size(1, 65), draw.size(0, 1, 2)
    given = draw.indices([rows], batch, I32), draw.indices([rows], vocab, I32), draw.indices([rows], 21, I32)
    draw.call(draw.tensor([batch, vocab], F32), *given)
