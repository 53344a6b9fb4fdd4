"""Two programs that run after a model's step: one draws tokens from the step's logits, one computes log-probabilities of given tokens.

    sample(logits[r, vocabulary], rows[n], ...) -> tokens[n], distances[n], totals[n], ranks[n], top_ids[n, m], top_distances[n, m]
    logprobs(logits[r, vocabulary], rows[n], tokens[n], tops[n]) -> the same results except tokens

`runtime.sampling` defines the operands and results; `m` is its NUM_TOP. Both programs read the logits from the buffer that the step wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.ir.dims import DimLike, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.module import IRModule
from compiler.ir.op import OpDef
from compiler.ir.types import tensor
from compiler.ops.sampling.operators import LOGPROB_OPERANDS, SAMPLE, SAMPLE_OPERANDS, TOKEN_LOGPROBS
from runtime.sampling import Number, Setting

SAMPLE_ENTRY, LOGPROBS_ENTRY = "sample", "logprobs"


def build_sampler(vocab_size: int, max_rows: int, beside: IRModule | None = None) -> IRModule:
    """Return a module with both programs, and with the functions of the module `beside` if it is given."""
    builder = Builder(beside)
    _add(builder, SAMPLE_ENTRY, SAMPLE, SAMPLE_OPERANDS, _sample_shapes(vocab_size, max_rows))
    _add(builder, LOGPROBS_ENTRY, TOKEN_LOGPROBS, LOGPROB_OPERANDS, _logprob_shapes(vocab_size, max_rows))
    return builder.finish()


def _sample_shapes(vocab_size: int, max_rows: int) -> list[tuple[DimLike, ...]]:
    """Return the shapes of SAMPLE_OPERANDS, in their order."""
    r, n = DimVar("r", 0, max_rows), DimVar("n", 0, max_rows)
    biased, seen, masked = DimVar("biased"), DimVar("seen"), DimVar("masked", 0, max_rows)
    lists: list[tuple[DimLike, ...]] = [(n + 1,), (biased,), (biased,), (n + 1,), (seen,), (seen,)]
    return [(r, vocab_size), (n,), (n, len(Number)), (n, len(Setting)), *lists, (masked, -(-vocab_size // 32))]


def _logprob_shapes(vocab_size: int, max_rows: int) -> list[tuple[DimLike, ...]]:
    """Return the shapes of LOGPROB_OPERANDS, in their order."""
    r, n = DimVar("r", 0, max_rows), DimVar("n", 0, max_rows)
    return [(r, vocab_size), (n,), (n,), (n,)]


def _add(builder: Builder, name: str, op: OpDef, operands: Mapping[str, DType], shapes: Sequence[tuple[DimLike, ...]]) -> None:
    params = [Var(operand, tensor(shape, dtype)) for (operand, dtype), shape in zip(operands.items(), shapes, strict=True)]
    with builder.function(name, params):
        builder.returns(builder.call(op, *params))
