"""Routing of a mixture of experts: from tokens to experts and back.

    experts = top_experts(scores, k=8)                             the experts that each token chooses
    tokens, chosen, places = group_rows(experts, count=128)        one row per choice, sorted by expert
    y = expert_linear(embedding(x, tokens), weights, chosen)       see products/experts.py
    out = sum_rows(y, places, shares)                              the weighted sum of each token's expert outputs

The experts of a token are in ascending order. Of two experts with equal scores, the expert with the lower number ranks first. So the order
in which a token's outputs are added depends neither on ties nor on the other tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, Kernel, bits_of, cast, equal, fold, guard, index, select
from compiler.ir.op import REQUIRED
from compiler.ir.relations import Relation, at_most
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import output, sized_buffer
from compiler.ops.index import clamped_index
from compiler.ops.indices import Extent, clamped
from compiler.ops.operands import agree, int_attr, num_elements, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I32, I64 = DType.F32, DType.I32, DType.I64
LOWEST = -(1 << 63)
MOST_CHOICES = 64  # largest number of experts per token

# --- top_experts -------------------------------------------------------------------------------------------------------


def _top_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    scores, k = wants_float(tensor_operand(args, 0, "scores", ndim=2, layout="[tokens, experts]"), "scores"), int_attr(attrs, "k", 1)
    if k > MOST_CHOICES:
        raise AnnotationError(f"attribute k is {k}, expected at most {MOST_CHOICES}: the loop nest has a copy of its code per choice")
    if scores.shape is None:
        return TensorType(None, I32, 2)
    return TensorType((scores.shape[0], Dim.of(k)), I32)


def _top_relations(args: tuple[Type, ...], attrs: Attrs) -> Iterable[Relation]:
    if isinstance(scores := args[0], TensorType) and scores.shape is not None:
        yield at_most(int_attr(attrs, "k"), scores.shape[1], "attribute k", "the number of experts")


def order(value: Scalar) -> Scalar:
    """Return an integer that orders numbers of type f32, as an i64. The integer fits 32 bits, and is larger than -2^31. NaN counts as minus
    infinity, and both zeros are equal."""
    bits = cast(bits_of(select(equal(value, value), value, -np.inf) + 0.0), I64)  # + 0.0 replaces -0.0 by 0.0
    return select(bits < 0, bits * -1 - (1 << 31), bits)


def write_best(
    k: Kernel, out: Array, num_experts: Dim, score: Callable[[Dim, Dim], Scalar], best: Sequence[Array], chosen: Sequence[Array]
) -> None:
    """Write to `best` the ranks of the k best experts, from the best to the k-th. Then write to `chosen` and `out` the experts that rank at
    least as high as the k-th, from the lowest number to the highest. `score(token, expert)` is an f32; `best` and `chosen` are k arrays
    with an i64 per token."""
    tokens, size = out.shape[:1], (num_experts,)

    def rank(t: Dim, e: Dim) -> Scalar:
        """Return an integer that is larger the better the expert is: by score, then by number, the lower number being better."""
        return order(score(t, e)) * (1 << 32) - index(e)

    for before, own in zip([None, *best], best, strict=False):
        with k.nest(tokens) as (t,):

            def below(e: Dim, t: Dim = t, before: Array | None = before) -> Scalar:
                return rank(t, e) if before is None else select(rank(t, e) < before[t], rank(t, e), LOWEST)

            own[t] = fold(ReduceFn.MAX, size, below)
    for before, own in zip([None, *chosen], chosen, strict=False):
        with k.nest(tokens) as (t,):

            def above(e: Dim, t: Dim = t, before: Array | None = before) -> Scalar:
                found = ~(rank(t, e) < best[-1][t])
                return select(found if before is None else found & (before[t] < index(e)), index(e), num_experts)

            own[t] = fold(ReduceFn.MIN, size, above)
    for c, own in enumerate(chosen):
        with k.nest(tokens) as (t,):
            out[t, c] = cast(own[t], I32)


def _top_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, scores = k.arrays(output(operands), operands.buffer(0))
    num_tokens, num_experts = scores.shape
    names = ([f"{name}{c}" for c in range(operands.attrs["k"])] for name in ("best", "chosen"))
    best, chosen = ([k.workspace(name, num_tokens, dtype=I64) for name in each] for each in names)
    write_best(k, out, num_experts, lambda t, e: cast(scores[t, e], F32), best, chosen)
    return Nest((out.buffer,), k.body())


def _top_numpy(scores: Any, *, k: int) -> Any:
    wide = scores.astype(np.float32)
    order = np.argsort(-np.where(np.isnan(wide), -np.inf, wide), axis=1, kind="stable")
    return np.sort(order[:, :k], axis=1).astype(np.int32)


TOP_EXPERTS = define("top_experts", "scores", _top_type, _top_numpy, _top_nest, {"k": REQUIRED}, relations=_top_relations)


# --- group_rows --------------------------------------------------------------------------------------------------------


def _group_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: tokens [rows], experts [rows], places [tokens, k], with rows = tokens * k."""
    experts = wants_int(tensor_operand(args, 0, "experts", ndim=2, layout="[tokens, k]"), "experts")
    int_attr(attrs, "count", 1)
    if experts.shape is None:
        return TupleType((TensorType(None, I32, 1), TensorType(None, I32, 1), TensorType(None, I32, 2)))
    rows = TensorType((num_elements(experts.shape),), I32)
    return TupleType((rows, rows, TensorType(experts.shape, I32)))


def group_nest(experts: Buffer, outputs: Sequence[Buffer], count: int) -> Stmt:
    """Count the rows of each expert, then assign each choice, in order, to the next free row of its expert. `outputs` are the tokens and
    the experts of rows, and the places of choices."""
    k = Kernel()
    choices, (tokens, chosen, places) = k.array(experts), k.arrays(*outputs)
    size, following = k.workspace("size", count, dtype=I32), k.workspace("following", count, dtype=I32)

    def expert_at(at: tuple[Dim, ...]) -> Dim:
        return clamped_index(k, "expert", choices[at], Dim.of(count))

    with k.nest((count,)) as (e,):
        size[e] = 0
    with k.nest(choices.shape) as at:
        e = expert_at(at)
        size[e] = size[e] + 1
    with k.nest((count,)) as (e,):
        following[e] = guard(1, e, count, following[e - 1] + size[e - 1], 0)
    with k.nest(choices.shape) as (t, c):
        e = expert_at((t, c))
        row = k.let("row", cast(following[e], I64), tokens.shape[0] - 1)
        tokens[row] = cast(index(t), I32)
        chosen[row] = cast(index(e), I32)
        places[t, c] = cast(index(row), I32)
        following[e] = following[e] + 1
    return k.body()


def _group_nest(operands: Operands) -> Nest:
    assert isinstance(operands.out, TupleType)
    outputs = tuple(sized_buffer(t, name) for t, name in zip(operands.out.fields, ("tokens", "chosen", "places"), strict=True))
    return Nest(outputs, group_nest(operands.buffer(0), outputs, operands.attrs["count"]))


def _group_numpy(experts: Any, *, count: int) -> Any:
    flat = experts.reshape(-1).astype(np.int32)
    order = np.argsort(flat, kind="stable")
    places = np.empty(len(flat), np.int32)
    places[order] = np.arange(len(flat))
    return (order // max(1, experts.shape[1])).astype(np.int32), flat[order], places.reshape(experts.shape)


GROUP_ROWS = define(
    "group_rows", "experts", _group_type, _group_numpy, _group_nest, {"count": REQUIRED}, indices={"experts": clamped("count")}
)


# --- sum_rows ----------------------------------------------------------------------------------------------------------


def _sum_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotation of the result, [tokens, size]."""
    y = wants_float(tensor_operand(args, 0, "y", ndim=2, layout="[rows, size]"), "y")
    places = wants_int(tensor_operand(args, 1, "places", ndim=2, layout="[tokens, k]"), "places")
    shares = wants_float(tensor_operand(args, 2, "shares", ndim=2, layout="[tokens, k]"), "shares")
    if places.shape is not None and not (places.shape[1].is_const and places.shape[1].const > 0):
        raise AnnotationError(f"dimension 1 of places is {places.shape[1]}, expected a positive number")
    for d, (wanted, given) in enumerate(zip(places.shape or (), shares.shape or places.shape or (), strict=True)):
        agree(wanted, given, f"dimension {d} of shares")
    if y.shape is None or places.shape is None:
        return TensorType(None, y.dtype, 2)
    agree(num_elements(places.shape), y.shape[0], "dimension 0 of y")
    return TensorType((places.shape[0], y.shape[1]), y.dtype)


def _sum_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, y, places, shares = k.arrays(output(operands), *(operands.buffer(i) for i in range(3)))
    with k.nest(places.shape[:1]) as (t,):
        rows = [clamped_index(k, f"row{c}", places[t, c], y.shape[0]) for c in range(places.shape[1].const)]
        with k.nest(y.shape[1:]) as (n,):
            terms = [cast(shares[t, c], F32) * cast(y[row, n], F32) for c, row in enumerate(rows)]
            result: Scalar = terms[0]
            for term in terms[1:]:
                result = result + term
            out[t, n] = cast(result, out.dtype)
    wanted = {0: (num_elements(places.shape), y.shape[1]), 2: places.shape}
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


def _sum_numpy(y: Any, places: Any, shares: Any) -> Any:
    found = y[places].astype(np.float32) * shares.astype(np.float32)[..., None]  # [tokens, k, size]
    return np.add.accumulate(found, axis=1, dtype=np.float32)[:, -1].astype(y.dtype)


# out[t] = shares[t, 0] * y[places[t, 0]] + shares[t, 1] * y[places[t, 1]] + ..., added in this order.
SUM_ROWS = define("sum_rows", "y, places, shares", _sum_type, _sum_numpy, _sum_nest, indices={"places": clamped(Extent("y"))})
