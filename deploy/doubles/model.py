"""Models without kernels: the doubles that every test of the server runs on.

`NullModel` keeps what a real model keeps: one entry per slot of a paged pool, which depends on the token and on all before it. Each
row of logits is computed from the entries that are read back through the page table. A wrong page, a wrong slot, a missing copy, a
page shared behind another beginning or handed out too early therefore gives wrong tokens, as it would on a device. It also refuses a
batch that breaks the contract of `server/engine/step_model.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from compiler.ops.sampling.meaning import sample, token_logprobs
from runtime.kv_pool import PAGE_SIZE
from runtime.sampling import Logprobs, SampleBatch, Sampled
from server.engine.step_model import EmbedLimits, Logits, StepBatch, StepLimits

History = NDArray[np.int32]  # the tokens of one sequence up to a row
State = NDArray[np.uint64]  # per token: a digest of it and of all before it
LogitsOf = Callable[[History], NDArray[np.float32]]

NEVER_WRITTEN = -1
_ODD = 0x9E3779B97F4A7C15  # arithmetic on uint64 wraps


class BatchError(ValueError):
    """A StepBatch that no model could run."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step pretends to cost."""

    step_s: float = 0.0
    token_s: float = 0.0

    def spend(self, num_tokens: int) -> None:
        cost_s = self.step_s + num_tokens * self.token_s
        if cost_s > 0:
            time.sleep(cost_s)


@dataclass(frozen=True, slots=True, eq=False)
class NullLogits:
    """A handle that gives an engine nothing to read: no length, no rows, no numbers."""

    rows: NDArray[np.float32]


class NullModel:
    def __init__(self, limits: StepLimits, *, logits_of: LogitsOf | None = None, cost: StepTime | None = None) -> None:
        self._limits = limits
        self._logits_of = logits_of or hashed_logits(limits.vocab_size)
        self._cost = cost or StepTime()
        self._tokens = np.full((limits.num_pages, PAGE_SIZE), NEVER_WRITTEN, np.int32)
        self._states: State = np.zeros((limits.num_pages, PAGE_SIZE), np.uint64)
        self._powers = np.cumprod(np.full(limits.max_context, _ODD, np.uint64))
        self._hidden = np.empty((0, limits.embedding_size), np.float32)

    @property
    def limits(self) -> StepLimits:
        return self._limits

    def run(self, batch: StepBatch) -> Logits:
        self._check(batch)
        self._tokens.reshape(-1)[batch.slots] = batch.tokens
        for i, pages in enumerate(batch.page_tables):
            self._append(batch, i, pages)
        self._hidden = self._rows(batch, batch.hidden_rows, self._limits.embedding_size, hashed_logits(self._limits.embedding_size))
        self._cost.spend(len(batch.tokens))
        return Logits(NullLogits(self._rows(batch, batch.logit_rows, self._limits.vocab_size, self._logits_of)))

    def hidden(self) -> NDArray[np.float32]:
        return self._hidden

    def _rows(self, batch: StepBatch, wanted: NDArray[np.int32], size: int, row_of: LogitsOf) -> NDArray[np.float32]:
        rows = np.empty((len(wanted), size), np.float32)
        owners = np.searchsorted(batch.query_starts, wanted, side="right") - 1
        for i, (row, owner) in enumerate(zip(wanted, owners, strict=True)):
            length = int(batch.positions[row]) + 1
            pages = batch.page_tables[owner, : -(-length // PAGE_SIZE)]
            history = self._tokens[pages].reshape(-1)[:length]
            rows[i] = row_of(history)
            if not np.array_equal(self._states[pages].reshape(-1)[:length], self._digests(history, 0)):
                rows[i] = rows[i, ::-1]  # not what was computed behind this beginning: wrong tokens, not an error
        return rows

    def _append(self, batch: StepBatch, i: int, pages: NDArray[np.int32]) -> None:
        first, last = batch.query_starts[i : i + 2]
        start = int(batch.positions[first])
        before = self._states[pages[(start - 1) // PAGE_SIZE], (start - 1) % PAGE_SIZE] if start else np.uint64(0)
        self._states.reshape(-1)[batch.slots[first:last]] = self._digests(batch.tokens[first:last], start) + before

    def _digests(self, tokens: NDArray[np.int32], start: int) -> State:
        """Of each token and those before it in `tokens`, the first of which is at position `start`."""
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        return np.cumsum(mixed * self._powers[start : start + len(tokens)])

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        return Sampled.of(sample(_rows_of(logits), *batch.arrays))

    def logprobs(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Logprobs:
        return Logprobs(*token_logprobs(_rows_of(logits), rows, tokens, tops))

    def download(self, logits: Logits) -> NDArray[np.float32]:
        return _rows_of(logits).copy()

    def copy_page(self, source: int, target: int) -> None:
        if not 0 < target < self._limits.num_pages:
            raise BatchError(f"copy to page {target}: expected 1 <= page < {self._limits.num_pages}")
        self._tokens[target] = self._tokens[source]
        self._states[target] = self._states[source]

    def _check(self, batch: StepBatch) -> None:
        limits = self._limits
        counts = np.diff(batch.query_starts)
        num_seqs, num_tokens = len(counts), len(batch.tokens)
        _expect(num_tokens, "tokens", 1, limits.max_tokens)
        _expect(num_seqs, "sequences", 1, limits.max_seqs)
        _expect(len(batch.logit_rows) + len(batch.hidden_rows), "rows", 0, limits.max_seqs)
        if (len(batch.logit_rows) and not limits.generates) or (len(batch.hidden_rows) and not limits.embedding_size):
            raise BatchError("rows of a kind that the model does not give")
        if int(batch.query_starts[-1]) != num_tokens or (counts < 1).any():
            raise BatchError(f"query_starts {batch.query_starts.tolist()} do not split {num_tokens} tokens")
        for token_id in (int(batch.tokens.min()), int(batch.tokens.max())):
            _expect(token_id, "token id", 0, limits.vocab_size - 1)
        _expect(int(batch.context_lens.max()), "context", 1, limits.max_context)
        owners = np.repeat(np.arange(num_seqs), counts)
        starts = batch.context_lens - counts
        positions = starts[owners] + np.arange(num_tokens) - batch.query_starts[owners]
        pages = batch.page_tables[owners, positions // PAGE_SIZE]
        if not np.array_equal(batch.positions, positions):
            raise BatchError("positions of a sequence are not the last ones of its context")
        if not np.array_equal(batch.slots, pages * PAGE_SIZE + positions % PAGE_SIZE):
            raise BatchError("slots disagree with the page tables")
        if (pages == 0).any() or len(np.unique(batch.slots)) != num_tokens:
            raise BatchError("a token goes to page 0, or two go to one slot")
        if (np.diff(batch.logit_rows) <= 0).any() or (np.diff(batch.hidden_rows) <= 0).any():
            raise BatchError("rows are not ascending")
        used = -(-batch.context_lens // PAGE_SIZE)
        if batch.page_tables[np.arange(batch.page_tables.shape[1]) >= used[:, None]].any():
            raise BatchError("a page table names pages beyond its context")


def _rows_of(logits: Logits) -> NDArray[np.float32]:
    assert isinstance(logits, NullLogits), logits
    return logits.rows


class NullEmbedModel:
    """Each vector is a function of its text alone."""

    def __init__(self, limits: EmbedLimits, *, cost: StepTime | None = None) -> None:
        self._limits = limits
        self._cost = cost or StepTime()

    @property
    def limits(self) -> EmbedLimits:
        return self._limits

    def run(self, token_lists: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        num_tokens = sum(map(len, token_lists))
        _expect(len(token_lists), "texts", 1, self._limits.max_seqs)
        _expect(num_tokens, "tokens", 1, self._limits.max_tokens)
        vector_of = hashed_logits(self._limits.embedding_size)
        self._cost.spend(num_tokens)
        return np.stack([vector_of(np.asarray(tokens, np.int32)) for tokens in token_lists])


def hashed_logits(vocab_size: int) -> LogitsOf:
    """Logits in [-8, 8) that change everywhere when one token of the history does."""
    ramp = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_ODD)

    def logits_of(history: History) -> NDArray[np.float32]:
        digest = blake2b(history.astype("<i4").tobytes(), digest_size=8).digest()
        bits = ramp ^ np.uint64(int.from_bytes(digest, "little"))
        bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-20) - np.float32(8.0)

    return logits_of


def scripted_logits(vocab_size: int, script: Sequence[int]) -> LogitsOf:
    """Logits that make every prompt continue with `script`, over and over: end it with an end-of-sequence token. The place in the
    script is the longest beginning of it that the history ends with, so the prompt should not end in the script's first token."""
    wanted = np.asarray(script, np.int32)

    def logits_of(history: History) -> NDArray[np.float32]:
        longest = min(len(history), len(wanted) - 1)
        done = next(k for k in range(longest, -1, -1) if np.array_equal(history[len(history) - k :], wanted[:k]))
        logits = np.zeros(vocab_size, np.float32)
        logits[wanted[done]] = 50.0
        return logits

    return logits_of


def _expect(value: int, name: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BatchError(f"{name}: {value}, expected {low} to {high}")
