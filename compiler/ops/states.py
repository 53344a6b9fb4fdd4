"""Recurrent states that a layer keeps per sequence, and the causal convolution, whose state is its last inputs.

States are stored in pages, `[layers, pages, size]`. A page has the state after the last token computed within it. From the state of a full
page, any sequence that begins with the same tokens can continue. Page 0 belongs to no sequence; a sequence at its beginning has a state of
zeros.

    sources [s]      the page with the state before the first token of each sequence; 0: the sequence begins in this step
    saved [m]        the tokens after which a state is saved: per sequence, the last token within each page
    starts [s + 1]   the first token of each sequence; the last entry is the number of tokens
    seq_ids [t]      the sequence of each token

The layer is an operand of the operators that read or write states, so that all layers share one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, const, guard, total
from compiler.ir.relations import Relation, equal
from compiler.ir.types import TensorType, Type
from compiler.ops.attention.kv_cache import bound_layer, check_layer, layer_operand
from compiler.ops.broadcast import output
from compiler.ops.index import inside
from compiler.ops.indices import Extent, checked, clamped, owners, skipped, starts_of, zeroed
from compiler.ops.operands import agree, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

F32, I64 = DType.F32, DType.I64

# --- pages of states ---------------------------------------------------------------------------------------------------


def _states_operand(args: tuple[Type, ...]) -> TensorType:
    return wants_float(tensor_operand(args, 0, "states", ndim=3, layout="[layers, pages, size]"), "states")


def _vector(args: tuple[Type, ...], index: int, name: str, layout: str) -> Dim | None:
    """Return the length of a vector of integers, operand `index`, or None if it is unknown."""
    type_ = wants_int(tensor_operand(args, index, name, ndim=1, layout=layout), name)
    return None if type_.shape is None else type_.shape[0]


def _read_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    states = _states_operand(args)
    count = _vector(args, 1, "sources", "[s]")
    check_layer(args[2])
    if states.shape is None or count is None:
        return TensorType(None, states.dtype, 2)
    return TensorType((count, states.shape[2]), states.dtype)


def _read_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, states, sources = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    with k.scope():
        layer = bound_layer(k, layer_operand(operands.places[2]), states.buffer)
        with k.nest((out.shape[0],)) as (s,):
            page = k.let("page", cast(sources[s], I64), lower=-(1 << 63))
            with k.nest((out.shape[1],)) as (j,):
                out[s, j] = guard(1, page, states.shape[1], states[layer, page, j], const(0.0, out.dtype))
    return Nest((out.buffer,), k.body())


def _read_numpy(states: Any, sources: Any, layer: Any) -> Any:
    found = np.zeros((len(sources), states.shape[2]), states.dtype)
    found[sources != 0] = states[layer, sources[sources != 0]]
    return found


LAYER, PAGES = checked(Extent("states")), Extent("states", 1)
# Returns the states of sequences, [s, size]: out[s] = states[layer, sources[s]], and zeros for page 0 and pages that do not exist.
STATE_READ = define(
    "state_read",
    "states, sources, layer",
    _read_type,
    _read_numpy,
    _read_nest,
    indices={"sources": zeroed(PAGES), "layer": LAYER},
)


def _write_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    states = _states_operand(args)
    values = wants_float(tensor_operand(args, 1, "values", ndim=2, layout="[m, size]"), "values")
    count = _vector(args, 2, "pages", "[m]")
    check_layer(args[3])
    if values.shape is not None and count is not None:
        agree(values.shape[0], count, "the length of pages")
    if values.shape is not None and states.shape is not None:
        agree(states.shape[2], values.shape[1], "the size of values")
    return states


def _write_nest(operands: Operands) -> Nest:
    k = Kernel()
    held, values, pages = (operands.buffer(i) for i in range(3))
    out = k.array(Buffer("new_states", held.shape, held.dtype))
    x, numbers = k.arrays(values, pages)
    with k.scope():
        layer = bound_layer(k, layer_operand(operands.places[3]), held)
        with k.nest((x.shape[0],)) as (m,), k.when(inside(numbers[m], held.shape[1])):
            page = k.let("page", cast(numbers[m], I64), held.shape[1] - 1)
            with k.nest((x.shape[1],)) as (j,):
                out[layer, page, j] = cast(x[m, j], out.dtype)
    wanted = {1: (values.shape[0], held.shape[2]), 2: (values.shape[0],)}
    return Nest((out.buffer,), k.body(), inplace=(0,), checks=unproved(operands, wanted))


def _write_numpy(states: Any, values: Any, pages: Any, layer: Any) -> Any:
    states, wide = states.copy(), pages.astype(np.int64)
    kept = (wide >= 0) & (wide < states.shape[1])
    states[layer, wide[kept]] = values[kept]
    return states


# Changes states in place: states[layer, pages[m]] = values[m]. A page that does not exist is skipped.
STATE_WRITE = define(
    "state_write",
    "states, values, pages, layer",
    _write_type,
    _write_numpy,
    _write_nest,
    indices={"pages": skipped(PAGES), "layer": LAYER},
)


# --- causal convolution ------------------------------------------------------------------------------------------------


def _taps_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    weight = wants_float(tensor_operand(args, 0, "weight", ndim=3, layout="[size, 1, taps]"), "weight")
    return TensorType(weight.shape and (weight.shape[2], weight.shape[0]), F32, 2)


def _taps_relations(args: tuple[Type, ...], _: Mapping[str, Any]) -> Iterable[Relation]:
    if isinstance(weight := args[0], TensorType) and weight.shape is not None:
        yield equal(weight.shape[1], 1, "dimension 1 of weight")


def _taps_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, weight = k.arrays(output(operands), operands.buffer(0))
    with k.nest(out.shape) as (r, j):
        out[r, j] = cast(weight[j, 0, r], F32)
    return Nest((out.buffer,), k.body(), attrs={"schedule": "taps"})  # nests with a schedule are not fused: this one runs at load time


def _taps_numpy(weight: Any) -> Any:
    return weight[:, 0].T.astype(np.float32)


CONV_TAPS = define("conv_taps", "weight", _taps_type, _taps_numpy, _taps_nest, relations=_taps_relations)
"""Transpose the weights of a convolution from [size, 1, taps], as checkpoints store them, to [taps, size] in f32, as `causal_conv` reads
them."""


def _rows_type(args: tuple[Type, ...], before: int) -> tuple[TensorType, TensorType]:
    """Return the annotations of x and of the inputs that precede each sequence, the operand with the number `before`."""
    x = wants_float(tensor_operand(args, 0, "x", ndim=2, layout="[t, size]"), "x")
    kept = wants_float(tensor_operand(args, before, "before", ndim=3, layout="[s, rows, size]"), "before")
    if x.shape is not None and kept.shape is not None:
        agree(x.shape[1], kept.shape[2], "the size of before")
    return x, kept


def _input(x: Array, before: Array, token: Dim, sequence: Dim, start: Dim, j: Dim) -> Scalar:
    """Return element `j` of the input at `token`. The input of a token before the `start` of its sequence is read from `before`, or is 0 if
    `before` does not reach back to this token."""
    rows = before.shape[1]
    row = rows + token - start
    return guard(start, token, x.shape[0], cast(x[token, j], F32), guard(0, row, rows, cast(before[sequence, row, j], F32), 0.0))


def _sequence_of(k: Kernel, seq_ids: Array, starts: Array, token: Dim) -> tuple[Dim, Dim]:
    """Return the sequence of a token, and the first token of this sequence."""
    sequence = k.let("s", cast(seq_ids[token], I64))
    return sequence, k.let("start", cast(starts[sequence], I64))


def _conv_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    x, before = _rows_type(args, 2)
    weight = wants_float(tensor_operand(args, 1, "weight", ndim=2, layout="[taps, size]"), "weight")
    if x.shape is not None and weight.shape is not None:
        agree(x.shape[1], weight.shape[1], "the size of weight")
    if before.shape is not None and weight.shape is not None:
        agree(before.shape[1] + 1, weight.shape[0], "the number of taps of weight")
    length = _vector(args, 3, "seq_ids", "[t]")
    if x.shape is not None and length is not None:
        agree(x.shape[0], length, "the length of seq_ids")
    _agree_starts(before, _vector(args, 4, "starts", "[s + 1]"))
    return x


def _agree_starts(before: TensorType, length: Dim | None) -> None:
    if before.shape is not None and length is not None:
        agree(before.shape[0] + 1, length, "the length of starts")


def _conv_nest(operands: Operands) -> Nest:
    k = Kernel()
    out = k.array(output(operands))
    x, weight, before, seq_ids, starts = k.arrays(*(operands.buffer(i) for i in range(5)))
    tokens, size = x.shape
    rows = before.shape[1]
    with k.nest((tokens,)) as (t,):
        sequence, start = _sequence_of(k, seq_ids, starts, t)
        with k.nest((size,)) as (j,):
            sum_ = total((rows + 1,), lambda r: _input(x, before, t - rows + r, sequence, start, j) * cast(weight[r, j], F32))
            out[t, j] = cast(sum_, out.dtype)
    wanted = {1: (rows + 1, size), 2: (before.shape[0], rows, size), 3: (tokens,), 4: (before.shape[0] + 1,)}
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


def _conv_numpy(x: Any, weight: Any, before: Any, seq_ids: Any, starts: Any) -> Any:
    out = np.zeros(x.shape, np.float32)
    for t, s in enumerate(seq_ids):
        out[t] = (_last_inputs(len(weight), x, before, t, s, starts) * weight.astype(np.float32)).sum(0)
    return out.astype(x.dtype)


def _last_inputs(count: int, x: Any, before: Any, token: int, sequence: int, starts: Any) -> Any:
    """Return the last `count` inputs of a sequence up to a token, in f32. `before` has the inputs that precede the sequence."""
    inputs = np.concatenate([part.astype(np.float32) for part in (before[sequence], x[starts[sequence] : token + 1])])
    return inputs[len(inputs) - count :]


BY_SEQUENCE = {"starts": starts_of(Extent("x")), "seq_ids": owners("starts")}
# out[t] = the sum over r of weight[r] times the input taps - 1 - r tokens before t. Inputs before a sequence's first token in this step are
# in `before` [s, taps - 1, size].
CAUSAL_CONV = define("causal_conv", "x, weight, before, seq_ids, starts", _conv_type, _conv_numpy, _conv_nest, indices=BY_SEQUENCE)


def _tails_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    x, before = _rows_type(args, 1)
    length = _vector(args, 2, "seq_ids", "[t]")
    if x.shape is not None and length is not None:
        agree(x.shape[0], length, "the length of seq_ids")
    _agree_starts(before, _vector(args, 3, "starts", "[s + 1]"))
    count = _vector(args, 4, "saved", "[m]")
    if before.shape is None or count is None:
        return TensorType(None, x.dtype, 3)
    return TensorType((count, *before.shape[1:]), x.dtype)


def _tails_nest(operands: Operands) -> Nest:
    k = Kernel()
    out = k.array(output(operands))
    x, before, seq_ids, starts, saved = k.arrays(*(operands.buffer(i) for i in range(5)))
    count, rows, size = out.shape
    with k.nest((count,)) as (m,):
        token = k.let("token", cast(saved[m], I64))
        sequence, start = _sequence_of(k, seq_ids, starts, token)
        with k.nest((rows, size)) as (r, j):
            out[m, r, j] = cast(_input(x, before, token + 1 - rows + r, sequence, start, j), out.dtype)
    wanted = {1: (before.shape[0], rows, x.shape[1]), 2: (x.shape[0],), 3: (before.shape[0] + 1,)}
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


def _tails_numpy(x: Any, before: Any, seq_ids: Any, starts: Any, saved: Any) -> Any:
    tails = [_last_inputs(before.shape[1], x, before, t, seq_ids[t], starts) for t in saved]
    return np.array(tails, np.float32).astype(x.dtype).reshape(len(saved), *before.shape[1:])


# Returns the last inputs up to each saved token, [m, rows, size]: what `before` must hold when the sequence continues after that token.
INPUT_TAILS = define(
    "input_tails",
    "x, before, seq_ids, starts, saved",
    _tails_type,
    _tails_numpy,
    _tails_nest,
    indices={**BY_SEQUENCE, "saved": clamped(Extent("x"), ahead=True)},
)
