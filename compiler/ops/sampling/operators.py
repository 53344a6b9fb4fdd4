"""The sampling operators: draw a token from each row of logits, and report log-probabilities. `runtime.sampling` defines their operands and
results; compiler/sampling/meaning.py defines what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler.ir.dims import Dim, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.statements import Stmt
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import sized_buffer
from compiler.ops.indices import Extent, capped, clamped
from compiler.ops.operands import agree, tensor_operand, unproved
from compiler.ops.sampling.kernels import logprobs_nest, sample_nest
from compiler.ops.tables import Nest, Operands, UnknownShape, define
from compiler.sampling.meaning import sample, token_logprobs
from runtime.sampling import NUM_TOP, Number, Setting

F32, I32, I64 = DType.F32, DType.I32, DType.I64

SAMPLE_OPERANDS = {
    "logits": F32,
    "rows": I32,
    "numbers": F32,
    "settings": I64,
    "bias_starts": I32,
    "bias_ids": I32,
    "bias_values": F32,
    "seen_starts": I32,
    "seen_ids": I32,
    "seen_counts": I32,
    "masks": I32,
}
LOGPROB_OPERANDS = {"logits": F32, "rows": I32, "tokens": I32, "tops": I32}


def _types(args: tuple[Type, ...], operands: Mapping[str, DType]) -> dict[str, TensorType]:
    """Return the annotations of the operands by name. Raise AnnotationError if a rank or element type is wrong."""
    types: dict[str, TensorType] = {}
    for i, (name, dtype) in enumerate(operands.items()):
        types[name] = tensor_operand(args, i, name, ndim=2 if name in ("logits", "numbers", "settings", "masks") else 1)
        if types[name].dtype not in (None, dtype):
            raise AnnotationError(f"{name} holds {types[name].dtype}, expected {dtype}")
    return types


def _agree_rows(types: Mapping[str, TensorType], names: tuple[str, ...]) -> Dim | None:
    """Return the number of rows, or None if it is unknown. Raise AnnotationError if a named operand is proved not to have an entry per row
    (in lists of starts: an entry per row, and one more)."""
    rows = types["rows"].shape
    for name in names:
        shape = types[name].shape
        if rows is not None and shape is not None:
            agree(rows[0] + 1 if name.endswith("starts") else rows[0], shape[0], f"dimension 0 of {name}")
    return None if rows is None else rows[0]


def _logprob_types(rows: Dim | None) -> tuple[TensorType, ...]:
    """Return the annotations of the fields of `runtime.sampling.Logprobs` for this number of rows."""

    def field(dtype: DType, *more: int) -> TensorType:
        return TensorType(None if rows is None else (rows, *map(Dim.of, more)), dtype, 1 + len(more))

    return field(F32), field(I64), field(I32), field(I32, NUM_TOP), field(F32, NUM_TOP)


def _sample_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    types = _types(args, SAMPLE_OPERANDS)
    rows = _agree_rows(types, ("numbers", "settings", "bias_starts", "seen_starts"))
    for name, columns in (("numbers", len(Number)), ("settings", len(Setting))):
        shape = types[name].shape
        if shape is not None:
            agree(Dim.of(columns), shape[1], f"dimension 1 of {name}")
    for ids, name in (("bias_ids", "bias_values"), ("seen_ids", "seen_counts")):
        if (wanted := types[ids].shape) is not None and (shape := types[name].shape) is not None:
            agree(wanted[0], shape[0], f"the length of {name}")
    if (logits := types["logits"].shape) is not None and (masks := types["masks"].shape) is not None:
        agree(ceil_div(logits[1], 32), masks[1], "dimension 1 of masks")
    tokens = TensorType(None if rows is None else (rows,), I32, 1)
    return TupleType((tokens, *_logprob_types(rows)))


def _logprobs_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    return TupleType(_logprob_types(_agree_rows(_types(args, LOGPROB_OPERANDS), ("tokens", "tops"))))


LOGPROB_FIELDS = ("distances", "totals", "ranks", "top_ids", "top_distances")  # the fields of `runtime.sampling.Logprobs`


def _sample_nest(operands: Operands) -> Nest:
    given = _given(operands, SAMPLE_OPERANDS)
    count, num_words = given["rows"].shape[0], -(-given["logits"].shape[1].const // 32)
    wanted = {
        "numbers": (count, Dim.of(len(Number))),
        "settings": (count, Dim.of(len(Setting))),
        "bias_starts": (count + 1,),
        "bias_values": given["bias_ids"].shape,
        "seen_starts": (count + 1,),
        "seen_counts": given["seen_ids"].shape,
        "masks": (given["masks"].shape[0], Dim.of(num_words)),
    }
    return _nest(operands, given, ("tokens", *LOGPROB_FIELDS), wanted, sample_nest)


def _logprobs_nest(operands: Operands) -> Nest:
    given = _given(operands, LOGPROB_OPERANDS)
    rows = given["rows"].shape
    return _nest(operands, given, LOGPROB_FIELDS, {"tokens": rows, "tops": rows}, logprobs_nest)


def _given(operands: Operands, names: Mapping[str, DType]) -> dict[str, Buffer]:
    given = {name: operands.buffer(i) for i, name in enumerate(names)}
    vocab = given["logits"].shape[1]
    if not vocab.is_const:
        raise UnknownShape(f"the vocabulary is {vocab}, and sampling needs a number; state it with match_cast")
    return given


def _nest(
    operands: Operands,
    given: Mapping[str, Buffer],
    results: tuple[str, ...],
    wanted: Mapping[str, tuple[Dim, ...]],
    write: Callable[[Mapping[str, Buffer], Mapping[str, Buffer]], Stmt],
) -> Nest:
    out = operands.out
    assert isinstance(out, TupleType)
    outputs = {name: sized_buffer(type_, name) for name, type_ in zip(results, out.fields, strict=True)}
    body = write(given, outputs)
    checks = unproved(operands, {list(given).index(name): shape for name, shape in wanted.items()})
    return Nest(tuple(outputs.values()), body, checks=checks, attrs={"schedule": "sampling"})


ROWS, TOKENS = clamped(Extent("logits")), clamped(Extent("logits", 1))
SAMPLE = define(
    "sample",
    ", ".join(SAMPLE_OPERANDS),
    _sample_type,
    sample,
    _sample_nest,
    indices={
        "rows": ROWS,
        "settings": capped({Setting.MASK: Extent("masks"), Setting.TOP: NUM_TOP + 1}),
        "bias_starts": clamped(Extent("bias_ids", more=1)),
        "bias_ids": TOKENS,
        "seen_starts": clamped(Extent("seen_ids", more=1)),
        "seen_ids": TOKENS,
    },
)
TOKEN_LOGPROBS = define(
    "token_logprobs",
    ", ".join(LOGPROB_OPERANDS),
    _logprobs_type,
    token_logprobs,
    _logprobs_nest,
    indices={"rows": ROWS, "tokens": TOKENS, "tops": clamped(NUM_TOP + 1)},
)
