"""Recipes by which random programs call operators: one per operator, or one for several similar operators.

A recipe may make a call that its operator refuses; the call is then dropped. A new operator gets a recipe here, registered by `@recipe`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiler.ir.blocks import BLOCKS, PARTS
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import FuncRef, ShapeValue
from compiler.ir.graph.values import CallFunc, MakeTuple
from compiler.ir.prove import prove_eq
from compiler.ir.types import ShapeType, tensor
from compiler.machine.formats import PANELS
from compiler.ops.operands import num_elements
from tests.compiler.random_programs.programs import (
    BF16,
    BOOL,
    EXTENTS,
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    INTEGERS,
    U8,
    Draft,
    Unfit,
    broadcasts,
    recipe,
)


@recipe("exp log sqrt rsqrt tanh erf sin cos sigmoid silu gelu gelu_tanh softmax log_softmax")
def _of_floats(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(FLOATS))


@recipe("floor round", exact=True)
def _to_whole(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(FLOATS, exact=True))


@recipe("negative abs relu", exact=True)
def _of_numbers(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor([*FLOATS, *INTEGERS]))


@recipe("logical_not")
def _inverted(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor([BOOL, *INTEGERS]))


def _pair(draft: Draft, op: str, dtypes: Sequence[DType], *, exact: bool = False) -> None:
    a = draft.tensor(dtypes, exact=exact)
    pair = [a, draft.like(a, exact=exact)]
    draft.random.shuffle(pair)
    draft.call(op, *pair)


@recipe("minimum maximum", exact=True)
@recipe("add subtract multiply")
def _arithmetic(draft: Draft, op: str) -> None:
    _pair(draft, op, [*FLOATS, *FLOATS, *INTEGERS])


@recipe("divide power")
def _quotient(draft: Draft, op: str) -> None:
    _pair(draft, op, FLOATS)


@recipe("floor_divide modulo")
def _whole_quotient(draft: Draft, op: str) -> None:
    _pair(draft, op, INTEGERS)


@recipe("logical_and logical_or logical_xor")
def _bits(draft: Draft, op: str) -> None:
    _pair(draft, op, [BOOL, BOOL, BOOL, *INTEGERS])


@recipe("less less_equal greater greater_equal")
def _order(draft: Draft, op: str) -> None:
    _pair(draft, op, [*FLOATS, *INTEGERS], exact=True)


@recipe("equal not_equal")
def _equality(draft: Draft, op: str) -> None:
    _pair(draft, op, list(DType), exact=True)


@recipe("clip", exact=True)
def _clip(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS])
    draft.call(op, x, draft.like(x), draft.like(x))


@recipe("where", exact=True)
def _where(draft: Draft, op: str) -> None:
    a = draft.tensor()
    shape = draft.type(a).shape
    conditions = [c for c in draft.held if draft.type(c).dtype is BOOL and broadcasts(draft.type(c).shape, shape)]
    draft.call(op, draft.one_of(conditions) if conditions else draft.new(shape, BOOL), a, draft.like(a))


@recipe("cast", exact=True)
def _cast(draft: Draft, op: str) -> None:
    dtype = draft.one_of([*FLOATS, *DType])
    draft.call(op, draft.tensor(exact=not dtype.is_float), dtype=str(dtype))


@recipe("max min", exact=True)
@recipe("sum prod mean")
def _fold(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS if op == "mean" else [*FLOATS, *INTEGERS])
    draft.call(op, x, axes=draft.one_of([None, [-1], draft.axes(x)]), keepdims=draft.chance(0.4))


@recipe("any all")
def _fold_bools(draft: Draft, op: str) -> None:
    x = draft.tensor([BOOL])
    draft.call(op, x, axes=draft.one_of([None, draft.axes(x)]), keepdims=draft.chance(0.4))


@recipe("argmax argmin")
def _place(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS], least=1, exact=True)
    draft.call(op, x, axis=draft.axis(x), keepdims=draft.chance(0.4))


@recipe("cumsum")
def _cumsum(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS], least=1)
    draft.call(op, x, axis=draft.axis(x))


@recipe("sort argsort", exact=True)
def _sort(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1, exact=True)
    draft.call(op, x, axis=draft.axis(x), descending=draft.chance(0.5))


@recipe("top_k", exact=True)
def _top_k(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1, exact=True)
    axis = draft.axis(x)
    k = draft.one_of([0, 1, 3, draft.type(x).shape[axis]])
    draft.call(op, x, k=k, axis=axis, largest=draft.chance(0.5))


@recipe("reshape", exact=True)
def _reshape(draft: Draft, op: str) -> None:
    x = draft.tensor()
    shape = list(draft.type(x).shape)
    whole = num_elements(shape)
    choices = [[whole], [*shape[:-2], num_elements(shape[-2:])], [Dim.of(1), *shape], [whole, Dim.of(1)]]
    if shape:
        choices.append([*shape[:-1], shape[-1] // 2, Dim.of(2)])
    draft.call(op, x, ShapeValue(tuple(draft.one_of(choices))))


@recipe("expand_dims", exact=True)
def _expand_dims(draft: Draft, op: str) -> None:
    x = draft.tensor()
    draft.call(op, x, axes=[draft.random.randint(0, draft.type(x).ndim)])


@recipe("squeeze", exact=True)
def _squeeze(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=[i for i, d in enumerate(draft.type(x).shape) if prove_eq(d, 1)])


@recipe("broadcast_to", exact=True)
def _broadcast_to(draft: Draft, op: str) -> None:
    x = draft.tensor()
    shape = [draft.dim() if prove_eq(d, 1) else d for d in draft.type(x).shape]
    draft.call(op, x, ShapeValue((*draft.shape(draft.one_of([0, 0, 1])), *shape)))


@recipe("permute_dims", exact=True)
def _permute_dims(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=draft.one_of([None, draft.random.sample(range(draft.type(x).ndim), draft.type(x).ndim)]))


@recipe("flip", exact=True)
def _flip(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=draft.axes(x))


@recipe("slice", exact=True)
def _slice(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axis=draft.axis(x), begin=draft.place(), end=draft.one_of([None, draft.place()]), stride=draft.one_of([1, 1, 2, 3]))


@recipe("split", exact=True)
def _split(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    axis = draft.axis(x)
    whole, part = draft.type(x).shape[axis], draft.place()
    draft.call(op, x, axis=axis, sizes=draft.one_of([[part, whole - part], [whole], [whole // 2, whole - whole // 2], [0, 1, whole - 1]]))


@recipe("concat", exact=True)
def _join(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    others = [a for a in draft.held if draft.type(a).dtype is draft.type(x).dtype and draft.type(a).ndim == draft.type(x).ndim]
    parts = [x, *(draft.one_of(others) for _ in range(draft.random.randint(0, 2)))]
    draft.random.shuffle(parts)
    draft.call(op, *parts, axis=draft.axis(x))


@recipe("full", exact=True)
def _full(draft: Draft, op: str) -> None:
    dtype = draft.one_of(list(DType))
    draft.call(op, ShapeValue(tuple(draft.shape(draft.one_of(range(4))))), draft.scalar(dtype), dtype=str(dtype))


@recipe("arange", exact=True)
def _arange(draft: Draft, op: str) -> None:
    dtype = draft.one_of([I64, I64, I32, F32, I8, BF16])
    draft.call(op, start=draft.one_of([0, 3, -5]), stop=draft.dim(), step=draft.one_of([1, 1, 2, 5]), dtype=str(dtype))


@recipe("uniform", exact=True)
def _uniform(draft: Draft, op: str) -> None:
    draft.call(op, ShapeValue(tuple(draft.shape(draft.one_of(range(4))))), draft.scalar(I64))


@recipe("shape_of shape_to_tensor")
def _shape_to_tensor(draft: Draft, op: str) -> None:
    draft.call(
        "shape_to_tensor",
        draft.call("shape_of", draft.tensor()) if op == "shape_of" else ShapeValue(tuple(draft.shape(draft.one_of(range(4))))),
    )


@recipe("pad", exact=True)
def _pad(draft: Draft, op: str) -> None:
    x = draft.tensor()
    before, after = ([draft.one_of([0, 0, 1, 3, draft.place()]) for _ in draft.type(x).shape] for _ in range(2))
    draft.call(op, x, before=before, after=after, value=draft.one_of([0, 1]))


@recipe("tril", exact=True)
def _triangle(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(least=2), k=draft.one_of([0, 1, -1, 20, draft.place()]))


@recipe("take", exact=True)
def _take(draft: Draft, op: str) -> None:
    x, indices = draft.tensor(least=1), draft.tensor([I32, I64, I8, U8], exact=True)
    draft.call(op, x, indices, axis=draft.axis(x))


@recipe("gather scatter", exact=True)
def _gather(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    axis = draft.axis(x)
    shape = list(draft.type(x).shape)
    shape[axis] = draft.dim()
    indices = draft.new(shape, draft.one_of([I32, I64]))
    draft.call(op, x, indices, *([] if op == "gather" else [draft.new(shape, draft.type(x).dtype)]), axis=axis)


@recipe("all_gather", exact=True)
def _all_gather(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, *[x] * draft.one_of([1, 2, 4]), axis=draft.axis(x))


@recipe("rank_embedding", exact=True)
def _rank_embedding(draft: Draft, op: str) -> None:
    rows, columns, num_ranks = draft.one_of([1, 3, 8]), draft.dim(), draft.one_of([1, 2, 4])
    table = draft.new((Dim.of(rows), columns), draft.one_of([F32, BF16]))
    draft.call(op, draft.tensor([I32, I64, U8], exact=True), *[table] * num_ranks, size=rows * num_ranks)


@recipe("embedding", exact=True)
def _embedding(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(ndim=2), draft.tensor([I32, I64, U8], exact=True))


@recipe("linear")
def _linear(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    size = draft.one_of([Dim.of(draft.one_of(EXTENTS)), draft.dim()])
    w = draft.new((size, draft.type(x).shape[-1]), draft.one_of([draft.type(x).dtype, *FLOATS]))
    bias = [draft.new((size,), draft.one_of([F32, draft.type(x).dtype]))] if draft.chance(0.3) else []
    out = draft.one_of([None, None, "f32", "bf16"])
    draft.call(op, x, w, *bias, out_dtype=out, tolerates=draft.one_of([None, "bf16"]))


@recipe("matmul")
def _matmul(draft: Draft, op: str) -> None:
    a = draft.tensor([*FLOATS, *FLOATS, I8, I32], least=2)
    *batch, m, k = draft.type(a).shape
    flips = draft.chance(0.3), draft.chance(0.3)
    matrix = [m if flips[0] else k, draft.dim()]
    b = draft.new([*batch, *(reversed(matrix) if flips[1] else matrix)], draft.type(a).dtype)
    draft.call(op, a, b, transpose_a=flips[0], transpose_b=flips[1])


@recipe("top_experts group_rows", exact=True)
@recipe("expert_linear sum_rows")
def _mixture(draft: Draft, op: str) -> None:
    """Group rows by expert, multiply them, and sum the results of each token. Sometimes the experts of a token are in random order."""
    x, count, k = draft.tensor(FLOATS, ndim=2), draft.one_of([1, 3, 8]), draft.one_of([1, 2, 3])
    tokens, length = draft.type(x).shape
    chosen = draft.call("top_experts", draft.new((tokens, Dim.of(count)), draft.one_of(FLOATS)), k=k) if k <= count else None
    rows = draft.call("group_rows", draft.new((tokens, Dim.of(k)), I32) if chosen is None else chosen, count=count)
    of_rows, experts, places = draft.parts[rows]
    if draft.chance(0.2):
        experts = draft.new((tokens * k,), I32)
    size = draft.one_of([Dim.of(draft.one_of(EXTENTS)), draft.dim()])
    w = draft.new((Dim.of(count), size, length), draft.one_of([draft.type(x).dtype, *FLOATS]))
    bias = [draft.new((Dim.of(count), size), F32)] if draft.chance(0.3) else []
    y = draft.call("expert_linear", draft.call("embedding", x, of_rows), w, experts, *bias, tolerates=draft.one_of([None, "bf16"]))
    draft.call("sum_rows", draft.call("silu", y), places, draft.new((tokens, Dim.of(k)), F32))


@recipe("rms_norm")
def _rms_norm(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    draft.call(op, x, draft.new(draft.type(x).shape[-1:], draft.one_of(FLOATS)), eps=1e-5, weight_offset=draft.one_of([0.0, 1.0]))


@recipe("layer_norm")
def _layer_norm(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    draft.call(op, x, *(draft.new(draft.type(x).shape[-1:], draft.one_of(FLOATS)) for _ in range(draft.random.randint(1, 2))), eps=1e-5)


@recipe("quantize")
def _quantize(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1, exact=True)
    attrs = {"bits": draft.one_of([8, 4]), "group": draft.one_of([0, 0, 2, 16, 32])}
    made = draft.call(op, x, symmetric=draft.chance(0.6), dtype=str(draft.one_of(FLOATS)), **attrs)
    draft.call("dequantize", *draft.parts[made], dtype=str(draft.one_of(FLOATS)), **attrs)


@recipe("dequantize")
def _product_of_integers(draft: Draft, op: str) -> None:
    """Multiply by dequantized weights. Some machines compute such products in integers, so all numbers are finite."""
    if draft.special:
        raise Unfit
    x = draft.tensor([F32, F32, BF16], least=1)
    length, size = Dim.of(draft.one_of([4, 32, 64, 96, 512])), Dim.of(draft.one_of([1, 15, 16, 33, 64]))
    if not prove_eq(draft.type(x).shape[-1], length):
        x = draft.new([*draft.shape(draft.one_of([0, 1, 1, 2])), length], draft.one_of([F32, F32, BF16]))
    bits, group = draft.one_of([8, 4]), draft.one_of([0, 0, 32, 64, 16])
    q = draft.new((size, length * bits // 8), I8 if bits == 8 else U8)
    scales = (size, length // group if group else Dim.of(1))
    scale = draft.new(scales, draft.one_of([F32, DType.F16]), lambda extents: 0.01 + np.abs(draft.array(extents, F32)) * 0.01)
    zero = [draft.new(scales, draft.type(q).dtype)] if draft.chance(0.2) else []
    shift = [draft.new(scales, F32)] if not zero and draft.chance(0.2) else []
    dtype = str(draft.one_of([F32, BF16]))
    w = draft.call(op, q, scale, *zero, *shift, bits=bits, group=group, shifted=bool(shift), dtype=dtype)
    draft.call("linear", x, w, out_dtype=draft.one_of([None, "f32"]))


@recipe("unpack_blocks", exact=True)
def _blocks(draft: Draft, op: str) -> None:
    format = draft.one_of(list(BLOCKS.values()))
    part = draft.one_of([part for part in PARTS if format.part(part) is not None])
    blocks = draft.new([*draft.shape(draft.one_of([0, 1, 2])), Dim.of(draft.one_of([0, 1, 3]) * format.num_bytes)], U8)
    draft.call(op, blocks, format=format.name, part=part)


@recipe("panel_blocks", exact=True)
def _panel_blocks(draft: Draft, op: str) -> None:
    format = draft.one_of(list(BLOCKS.values()))
    panels = draft.one_of([panels for panels in PANELS.values() if panels.bits == format.bits])
    size, length = draft.one_of([1, 15, 16, 33]), draft.one_of([1, 3]) * format.num_bytes
    blocks = draft.new((Dim.of(size), Dim.of(length)), U8)
    draft.call(op, blocks, of=format.name, format=panels.name, columns=draft.one_of([4, 16, 32]))


@recipe("look_up")
def _look_up(draft: Draft, op: str) -> None:
    """Look up rows of a table, and sometimes multiply by the same table, as a model with tied embeddings does."""
    if draft.special:
        raise Unfit
    length, size = Dim.of(draft.one_of([32, 64, 96])), Dim.of(draft.one_of([1, 15, 16, 33]))
    bits, group, has_shift = draft.one_of([8, 4]), draft.one_of([0, 32, 16]), draft.chance(0.3)
    q = draft.new((size, length * bits // 8), I8 if bits == 8 else U8)
    scales = (size, length // group if group else Dim.of(1))
    scale = draft.new(scales, draft.one_of([F32, DType.F16]), lambda extents: 0.01 + np.abs(draft.array(extents, F32)) * 0.01)
    shift = [draft.new(scales, F32)] if has_shift else []
    ids = draft.new(draft.shape(draft.one_of([1, 2])), draft.one_of([I32, I64]))
    attrs = {"size": size.const, "length": length.const, "bits": bits, "offset": "shift" if has_shift else ""}
    x = draft.call(op, ids, q, scale, *shift, **attrs)
    if draft.chance(0.6):
        draft.call("linear", x, draft.call("dequantize", q, scale, *shift, bits=bits, group=group, shifted=has_shift))


@recipe("attention")
def _attention(draft: Draft, op: str) -> None:
    batch, queries, keys = draft.one_of([Dim.of(1), Dim.of(2)]), draft.dim(), draft.dim()
    heads, each, size, dtype = draft.one_of([1, 2]), draft.one_of([1, 2, 4]), draft.one_of([1, 8, 16, 20]), draft.one_of(FLOATS)
    q = draft.new((batch, Dim.of(heads * each), queries, Dim.of(size)), dtype)
    k, v = (draft.new((batch, Dim.of(heads), keys, Dim.of(size)), dtype) for _ in range(2))
    mask = [draft.new((queries, keys), draft.one_of([BOOL, F32]))] if draft.chance(0.4) else []
    attrs = {"causal": draft.chance(0.5), "window": draft.one_of([0, 0, 3]), "softcap": draft.one_of([0.0, 0.0, 5.0])}
    draft.call(op, q, k, v, *mask, scale=0.3, **attrs)


@recipe("rope_angles rope")
def _rope(draft: Draft, op: str) -> None:
    tokens, pairs = draft.dim(), draft.one_of([1, 4, 8])
    x = draft.new((tokens, Dim.of(draft.one_of([1, 3])), Dim.of(2 * pairs + draft.one_of([0, 0, 3]))), draft.one_of(FLOATS))
    positions = draft.new((tokens,), draft.one_of([I32, I64]), lambda extents: np.abs(draft.array(extents, I8)))
    angles = draft.call("rope_angles", positions, draft.new((Dim.of(pairs),), F32), scale=draft.one_of([1.0, 0.7]))
    draft.call("rope", x, *draft.parts[angles], interleaved=draft.chance(0.5))


@recipe("unique nonzero", exact=True)
def _counted_by_data(draft: Draft, op: str) -> None:
    x = draft.tensor(exact=True, least=1)
    count = DimVar(f"c{len(draft.sizes[0])}")
    shape = [count] if op == "unique" else [Dim.of(draft.type(x).ndim), count]
    found = draft.call(op, x)
    draft.name_sizes(found, tensor(shape, found.type.dtype))


@recipe("tensor_to_shape")
def _sized_by_data(draft: Draft, op: str) -> None:
    x = draft.new((Dim.of(2),), I64, lambda _: [draft.random.randint(0, 40), draft.random.randint(0, 40)])
    shape = tuple(Dim.of(DimVar(f"{name}{len(draft.sizes[0])}")) for name in "ab")
    draft.name_sizes(draft.call(op, x), ShapeType(shape))
    draft.call("full", ShapeValue(shape), draft.scalar(F32), dtype="f32")


@recipe("@tuple")
def _tuple(draft: Draft, _: str) -> None:
    parts = [draft.tensor(), draft.tensor()]
    draft.emit(MakeTuple(tuple(parts)), parts, exact=True)


@recipe("@call")
def _call(draft: Draft, _: str) -> None:
    x = draft.tensor([F32], ndim=2)
    helper = draft.one_of(draft.helpers)
    draft.require_few_elements(helper, x)
    draft.emit(CallFunc(FuncRef(helper), (x,)), [x])
