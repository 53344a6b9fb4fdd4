"""Models that compute nothing, with which the server's tests run.

`NullModel` has a paged cache as a real model does. Each cache group stores a digest of each token and of all tokens before it. The logits
of a row depend on the digests that the model reads back through the page tables; a group with a window reads only digests inside the
window. A wrong page, a wrong slot, a missing copy, a page shared after a different prefix, or a page reused too early therefore gives
wrong tokens, as on a device. The model also refuses a batch that breaks the contract of `server/engine/step_model.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from compiler.sampling.meaning import sample, token_logprobs
from runtime.parts import InParts
from runtime.sampling import Logprobs, SampleBatch, Sampled
from server.engine.step_model import EmbedLimits, Excerpts, GroupLimits, Heard, Logits, Places, StepBatch, StepLimits
from server.messages import Crop

History = NDArray[np.int32]  # the tokens of a sequence, up to the token whose logits are computed
State = NDArray[np.uint64]  # per token: a digest of the token and of all tokens before it
LogitsOf = Callable[[History], NDArray[np.float32]]

NEVER_WRITTEN = -1
_ODD = 0x9E3779B97F4A7C15  # odd multiplier; arithmetic on uint64 wraps


class BatchError(ValueError):
    """Raised if a StepBatch breaks the contract of a step model."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The simulated duration of a step."""

    step_s: float = 0.0
    token_s: float = 0.0

    def spend(self, num_tokens: int) -> None:
        cost_s = self.step_s + num_tokens * self.token_s
        if cost_s > 0:
            time.sleep(cost_s)


@dataclass(frozen=True, slots=True, eq=False)
class NullLogits:
    """Logits as an opaque handle, because the engine must not read them."""

    rows: NDArray[np.float32]


class NullModel:
    def __init__(self, limits: StepLimits, *, logits_of: LogitsOf | None = None, cost: StepTime | None = None) -> None:
        self._limits = limits
        self._logits_of = logits_of or hashed_logits(limits.vocab_size)
        self._cost = cost or StepTime()
        self._caches = [_GroupCache(group) for group in limits.groups]
        self._whole = next(i for i, group in enumerate(limits.groups) if group.window is None)  # index of a group without a window
        self._powers = np.cumprod(np.full(limits.max_context, _ODD, np.uint64))
        self._hidden = np.empty((0, limits.embedding_size), np.float32)
        self.num_parts = 3  # parts of an encoding
        self.encoded: set[bytes] = set()  # keys of the excerpts that are encoded and kept
        self.spared: frozenset[bytes] = frozenset()
        self.late: set[bytes] = set()  # keys of the excerpts that a step had to encode
        self.forgets = False  # it keeps nothing that is not spared
        self._work: Excerpts | Heard | None = None  # what has begun
        self._num_parts_left = 0

    @property
    def limits(self) -> StepLimits:
        return self._limits

    def run(self, batch: StepBatch) -> Logits:
        self._check(batch)
        self._forget()
        self.late |= {seen.key for seen in batch.seen if not self.is_encoded(seen.key)}
        for cache, places in zip(self._caches, batch.places, strict=True):
            cache.tokens.reshape(-1)[places.slots] = batch.tokens
            for i, pages in enumerate(places.page_tables):
                self._append(cache, places, batch, i, pages)
        self._hidden = self._rows(batch, batch.hidden_rows, self._limits.embedding_size, hashed_logits(self._limits.embedding_size))
        self._cost.spend(len(batch.tokens))
        return Logits(NullLogits(self._rows(batch, batch.logit_rows, self._limits.vocab_size, self._logits_of)))

    def hidden(self) -> NDArray[np.float32]:
        return self._hidden

    def is_encoded(self, key: bytes) -> bool:
        return key in self.encoded

    def encode(self, work: Excerpts | Heard) -> bool:
        if not isinstance(work, Heard) and work.keys() <= self.encoded:
            return True
        if work is not self._work and (isinstance(work, Heard) or work != self._work):
            self._work, self._num_parts_left = work, self.num_parts
        self._num_parts_left -= 1
        if self._num_parts_left:
            return False
        self._work = None
        self._forget()
        self.encoded.update(() if isinstance(work, Heard) else work)
        return True

    def spare(self, keys: Collection[bytes]) -> None:
        self.spared = frozenset(keys)

    def _forget(self) -> None:
        if self.forgets:
            self.encoded &= self.spared

    def _rows(self, batch: StepBatch, wanted: NDArray[np.int32], size: int, row_of: LogitsOf) -> NDArray[np.float32]:
        rows = np.empty((len(wanted), size), np.float32)
        owners = np.searchsorted(batch.query_starts, wanted, side="right") - 1
        for i, (row, owner) in enumerate(zip(wanted, owners, strict=True)):
            length = int(batch.positions[row]) + 1
            tables = [places.page_tables[owner] for places in batch.places]
            text = self._caches[self._whole].tokens[tables[self._whole]].reshape(-1)[: batch.context_lens[owner]]
            rows[i] = row_of(text[:length])
            digests = self._digests(text, 0)
            if not all(cache.is_right(pages, digests, length) for cache, pages in zip(self._caches, tables, strict=True)):
                rows[i] = rows[i, ::-1]  # the cache has data of another prefix: reverse the row, so that the tokens are wrong
        return rows

    def _append(self, cache: _GroupCache, places: Places, batch: StepBatch, i: int, pages: NDArray[np.int32]) -> None:
        first, last = batch.query_starts[i : i + 2]
        start = int(batch.positions[first])
        slots = places.slots[first:last]
        before = cache.state_behind(pages, start - 1) if start else np.uint64(0)
        cache.states.reshape(-1)[slots] = self._digests(batch.tokens[first:last], start) + before
        cache.lasts[slots // cache.page_size] = slots % cache.page_size  # if a page is written several times, the last slot wins

    def _digests(self, tokens: NDArray[np.int32], start: int) -> State:
        """Return, for each token, a digest of the token and of the tokens before it in `tokens`. The first token is at position `start`."""
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        return np.cumsum(mixed * self._powers[start : start + len(tokens)])

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        return Sampled.of(sample(_rows_of(logits), *batch.arrays))

    def logprobs(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Logprobs:
        return Logprobs(*token_logprobs(_rows_of(logits), rows, tokens, tops))

    def download(self, logits: Logits) -> NDArray[np.float32]:
        return _rows_of(logits).copy()

    def copy_page(self, group: int, source: int, target: int) -> None:
        cache, num_pages = self._caches[group], self._limits.groups[group].num_pages
        if not 0 < target < num_pages:
            raise BatchError(f"copy to page {target}: expected 1 <= page < {num_pages}")
        cache.tokens[target] = cache.tokens[source]
        cache.states[target] = cache.states[source]
        cache.lasts[target] = cache.lasts[source]

    def read_page(self, group: int, page: int) -> bytes:
        cache = self._caches[group]
        return b"".join(array[page].tobytes() for array in (cache.states, cache.tokens, cache.lasts))

    def write_page(self, group: int, page: int, data: bytes | memoryview) -> None:
        cache, at = self._caches[group], 0
        for array in (cache.states, cache.tokens, cache.lasts):
            count = array[page].size
            array[page] = np.frombuffer(data, array.dtype, count, at).reshape(array[page].shape)
            at += count * array.itemsize

    def _check(self, batch: StepBatch) -> None:
        limits = self._limits
        counts = np.diff(batch.query_starts)
        num_seqs, num_tokens = len(counts), len(batch.tokens)
        _expect(num_tokens, "tokens", 1, limits.max_tokens)
        _expect(num_seqs, "sequences", 1, limits.max_seqs)
        _expect(len(batch.logit_rows) + len(batch.hidden_rows), "rows", 0, limits.max_seqs)
        if (len(batch.logit_rows) and not limits.generates) or (len(batch.hidden_rows) and not limits.embedding_size):
            raise BatchError("the batch asks for logits or hidden states, which this model does not compute")
        if int(batch.query_starts[-1]) != num_tokens or (counts < 1).any():
            raise BatchError(f"query_starts is {batch.query_starts.tolist()}; expected ascending positions that end with {num_tokens}")
        for token_id in (int(batch.tokens.min()), int(batch.tokens.max())):
            _expect(token_id, "token id", 0, limits.vocab_size - 1)
        _expect(int(batch.context_lens.max()), "context", 1, limits.max_context)
        owners = np.repeat(np.arange(num_seqs), counts)
        if batch.seq_ids.dtype != np.int32 or not np.array_equal(batch.seq_ids, owners):
            raise BatchError("seq_ids must be the sequences that follow from query_starts, in 32 bits")
        starts = batch.context_lens - counts
        positions = starts[owners] + np.arange(num_tokens) - batch.query_starts[owners]
        if not np.array_equal(batch.positions, positions):
            raise BatchError("the positions of a sequence must be the last positions of its context")
        if (np.diff(batch.logit_rows) <= 0).any() or (np.diff(batch.hidden_rows) <= 0).any():
            raise BatchError("logit_rows and hidden_rows must be ascending")
        _expect(len(batch.places), "cache groups", len(limits.groups), len(limits.groups))
        for group, places in zip(limits.groups, batch.places, strict=True):
            self._check_places(group, places, batch, owners)

    def _check_places(self, group: GroupLimits, places: Places, batch: StepBatch, owners: NDArray[np.int64]) -> None:
        positions, tables = batch.positions, places.page_tables
        size = group.page_size
        pages = tables[owners, positions // size]
        if not np.array_equal(places.slots, pages * size + positions % size):
            raise BatchError("slots must be those that follow from positions and page tables")
        if (pages == 0).any() or len(np.unique(places.slots)) != len(positions):
            raise BatchError("a token is stored in page 0, or two tokens are stored in one slot")
        numbers, used = np.arange(tables.shape[1]), -(-batch.context_lens // size)
        if tables[numbers >= used[:, None]].any():
            raise BatchError("a page table names pages beyond its context")
        starts = positions[batch.query_starts[:-1]]
        if group.window is not None and tables[numbers < (np.maximum(starts - group.window + 1, 0) // size)[:, None]].any():
            raise BatchError("a page table names pages before its window")


def null_page_bytes(page_size: int) -> int:
    """Return the bytes of a page of a NullModel, as `read_page` returns it."""
    return page_size * 12 + 4


class _GroupCache:
    """The contents of a cache group: per slot the token, and a digest of the token and of all tokens before it."""

    def __init__(self, limits: GroupLimits) -> None:
        self.page_size = limits.page_size
        self.tokens = np.full((limits.num_pages, self.page_size), NEVER_WRITTEN, np.int32)
        self.states: State = np.zeros((limits.num_pages, self.page_size), np.uint64)
        self.lasts = np.zeros(limits.num_pages, np.int32)  # for each page, the offset of the token written last
        self._limits = limits

    def state_behind(self, pages: NDArray[np.int32], position: int) -> np.uint64:
        """Return the state after the token at a position. A page of a group that keeps states has only the state after its last token."""
        page = pages[position // self.page_size]
        return self.states[page, self.lasts[page] if self._limits.keeps_states else position % self.page_size]

    def is_right(self, pages: NDArray[np.int32], digests: State, length: int) -> bool:
        """Return whether all entries that token `length - 1` reads were computed for this prefix."""
        if self._limits.keeps_states:
            return self.state_behind(pages, len(digests) - 1) == digests[-1]
        first = 0 if self._limits.window is None else max(0, length - self._limits.window)
        return np.array_equal(self.states[pages].reshape(-1)[first:length], digests[first:length])


def _rows_of(logits: Logits) -> NDArray[np.float32]:
    assert isinstance(logits, NullLogits), logits
    return logits.rows


class NullEmbedModel:
    """An embedding model in which the vector of a text depends only on the text."""

    def __init__(self, limits: EmbedLimits, *, cost: StepTime | None = None) -> None:
        self._limits = limits
        self._cost = cost or StepTime()
        self.num_parts = 2  # in which images are encoded

    @property
    def limits(self) -> EmbedLimits:
        return self._limits

    def run(self, token_lists: Sequence[Sequence[int]], seconds: Sequence[int | None]) -> NDArray[np.float32]:
        num_tokens = sum(map(len, token_lists))
        _expect(len(token_lists), "texts", 1, self._limits.max_seqs)
        _expect(num_tokens, "tokens", 1, self._limits.max_tokens)
        vector_of = hashed_logits(self._limits.embedding_size)
        self._cost.spend(num_tokens)
        return np.stack([vector_of(np.asarray(tokens, np.int32)) for tokens in token_lists])

    def see(self, crops: Sequence[Crop]) -> InParts[NDArray[np.float32]]:
        for _ in range(self.num_parts - 1):
            yield
        vector_of = hashed_logits(self._limits.embedding_size)
        return np.stack([vector_of(np.frombuffer(crop.pixels, np.uint8).astype(np.int32)) for crop in crops])


def hashed_logits(vocab_size: int) -> LogitsOf:
    """Return a function from a history of tokens to logits in [-8, 8). If any token differs, all logits differ."""
    ramp = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_ODD)

    def logits_of(history: History) -> NDArray[np.float32]:
        digest = blake2b(history.astype("<i4").tobytes(), digest_size=8).digest()
        bits = ramp ^ np.uint64(int.from_bytes(digest, "little"))
        bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-20) - np.float32(8.0)

    return logits_of


def scripted_logits(vocab_size: int, script: Sequence[int]) -> LogitsOf:
    """Return a function from a history of tokens to logits, with which greedy decoding continues every prompt by `script`, again and again.
    The history ends with some prefix of the script; the next token is the one that follows the longest such prefix. The script should end
    with an end-of-sequence token, and a prompt should not end with the script's first token."""
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
        raise BatchError(f"{name}: {value}; expected {low} to {high}")
