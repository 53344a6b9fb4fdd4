"""Run a model over texts with its weights in f32, and return the logits and the sums of the squares of its matrices' inputs.

The program is compiled like any other, so it is the model itself that is measured. A text is cut into windows, which start without
context. The weights are those of a source that the caller names: the checkpoint's, or rounded ones.
"""

from __future__ import annotations

from collections.abc import Generator as Iterates
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compiler.bind import Rebinding
from compiler.frontend.decoder import OBSERVED, build_observed
from compiler.frontend.weights import WeightSource
from compiler.ir.module import IRModule
from deploy.model_loading.costs import tables_of
from deploy.model_loading.files import ModelFiles, dtypes_of
from deploy.model_loading.modes import Generator
from deploy.model_loading.program import compile_here
from deploy.model_loading.serving import arguments_of, limits_of
from runtime.executable import Executable
from runtime.kv_pool import KVPool
from runtime.memory import MemoryAccount
from runtime.session import Session
from server.engine.step_model import Places, StepBatch, StepLimits
from server.messages import Load

WINDOW = 512  # tokens that one step computes

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Observed(Generator):
    """A decoder that also returns the sums of the squares of the inputs of its matrices."""

    entry: ClassVar[str] = OBSERVED

    def module(self) -> IRModule:
        return self.built()[0]

    def built(self) -> tuple[IRModule, tuple[tuple[str, ...], ...]]:
        """Return the program and, for each input of matrices, the names of the matrices that read it."""
        return build_observed(self.files.config, dtypes_of(self.weights), self.bounds, self.kv_dtype, self.format)


@dataclass(frozen=True, slots=True)
class Observation:
    """The results of one window."""

    logits: Floats  # [rows, vocabulary]
    squares: tuple[Floats, ...]  # [in], for each input of matrices


class Observer:
    """The compiled program of a model, without weights."""

    def __init__(self, files: ModelFiles, num_rows: int) -> None:
        """`num_rows` is the largest number of rows of a window whose logits are requested."""
        window = min(WINDOW, files.config.max_context)
        load = Load("observed", str(files.path), "f32", max_context=window, max_batch=num_rows)
        self._mode = Observed.of(files, load)
        self.window = window
        module, self.names = self._mode.built()
        self._executable: Executable = compile_here(module)

    @contextmanager
    def bound(self, weights: WeightSource) -> Iterates[Bound]:
        """Load the program with these weights, and unload it at the end of the `with`."""
        account = MemoryAccount()
        session = Session(self._executable, memory=account)
        try:
            binding = Rebinding(session, self._executable, OBSERVED)
            binding.bind(weights)
            num_pages = [pages.least for pages in self._mode.pages()]
            pool = KVPool(self._mode.groups, num_pages, account, session.device)
            yield Bound(session, binding, pool, limits_of(self._mode, num_pages))
        finally:
            session.close()


@dataclass(frozen=True, slots=True)
class Bound:
    """The program with bound weights, and pages for one text."""

    session: Session
    binding: Rebinding
    pool: KVPool
    limits: StepLimits

    def run(self, tokens: Sequence[int], rows: Ints) -> Observation:
        """Compute one window. `rows` are the positions whose logits are requested."""
        arguments = arguments_of(chunk_of(self.limits, tokens, 0, len(tokens), rows), self.pool.groups)
        logits, *squares = self.session.call(OBSERVED, *arguments, rows, *self.pool.arguments)
        return Observation(logits, tuple(squares))


def chunk_of(limits: StepLimits, tokens: Sequence[int], start: int, stop: int, rows: Ints | None = None) -> StepBatch:
    """Return the step that computes the tokens `start` to `stop` - 1 of a text, after the tokens before them. `rows` are the rows of the
    step whose logits are requested: all by default."""
    count = stop - start
    positions = np.arange(start, stop, dtype=np.int32)
    places: list[Places] = []
    for group in limits.groups:
        tables, size = tables_of(group, 1, -(-len(tokens) // group.page_size)), group.page_size
        places.append(Places(tables[0, positions // size] * size + positions % size, tables[:, : -(-stop // size)].copy()))
    return StepBatch(
        tokens=np.array(tokens[start:stop], np.int32),
        positions=positions,
        query_starts=np.array([0, count], np.int32),
        seq_ids=np.zeros(count, np.int32),
        context_lens=np.array([stop], np.int32),
        places=tuple(places),
        logit_rows=np.arange(count, dtype=np.int32) if rows is None else rows,
    )


def windows_of(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cut a text into windows of equal length. A shorter rest is left out, unless the whole text is shorter than a window."""
    return [tokens[i : i + length] for i in range(0, max(len(tokens) - length, 0) + 1, length)]


def mean_squares(bound: Bound, windows: Sequence[Sequence[int]]) -> list[Floats]:
    """Return the mean of the squares of each input of matrices over all tokens."""
    totals: list[NDArray[np.float64]] = []
    for window in windows:
        squares = [s.astype(np.float64) for s in bound.run(window, rows_of(len(window), 1)).squares]
        totals = [a + b for a, b in zip(totals, squares, strict=True)] if totals else squares
    num_tokens = sum(map(len, windows))
    return [(total / num_tokens).astype(np.float32) for total in totals]


def rows_of(num_tokens: int, num_rows: int) -> Ints:
    """Return the positions of up to `num_rows` tokens, ascending and spread over the window. The last token is always one of them."""
    return np.unique(np.linspace(num_tokens - 1, 0, min(num_rows, num_tokens)).round().astype(np.int32))


def divergence(exact: Floats, found: Floats) -> float:
    """Return the mean KL divergence of the next token's distribution, in nats, for logits [rows, vocabulary]."""
    p, q = log_softmax(exact), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(-1, dtype=np.float64).mean())


def log_softmax(logits: Any) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
