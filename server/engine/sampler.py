"""Turn sampling parameters into the arrays with which a model samples, and turn the results into tokens and log-probabilities.

These arrays are a batch, `runtime.sampling.SampleBatch`; the model samples on the device, where its logits are. Each row of a batch comes
from the `RowState` of a sequence, which changes with every token appended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from runtime.sampling import NOT_A_NUMBER, NUM_TOP, SHARE_ONE, WEIGHT_BITS, Logprobs, SampleBatch, Setting
from server.constraints.matcher import Mask
from server.engine.step_model import Logits, StepModel
from server.messages import ErrorCode, SamplingParams, TokenLogprob

Ids = NDArray[np.int32]
# The sparse lists of a batch, as in SampleBatch: starts, ids and values of the logit biases; starts, ids and counts of the seen tokens.
Lists = tuple[Ids, Ids, NDArray[Any], Ids, Ids, NDArray[Any]]

SHARPEST = 1e30  # largest 1 / temperature
NONE = np.empty(0, np.int32)
EXCLUDING = "allowed and banned tokens, min_tokens, the budget of thoughts and the constraint"  # the rules that a mask combines


class SamplingError(Exception):
    """No token can be drawn from a row of logits. `code` tells whether the model or the request is the cause."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Drawn(Struct, frozen=True):
    """A drawn token; or, with token_id -1, the error because of which no token was drawn."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: SamplingError | None = None


class PenalisedTokens:
    """The distinct tokens to which the penalties of a sequence apply, and how often each occurs in the answer. The distinct tokens of the
    prompt come first."""

    def __init__(self, prompt_ids: Ids) -> None:
        """`prompt_ids` are the distinct tokens of the prompt, if penalties apply to them, in ascending order. The choices of a request
        share this array, because a prompt may have 100,000 tokens."""
        self._prompt_ids = prompt_ids
        self._num = len(prompt_ids)
        self._ids: Ids = prompt_ids  # other choices may share this array, so `add` copies it before it appends
        self._counts: Ids = np.zeros(self._num, np.int32)
        self._places: dict[int, int] = {}  # index in `ids` of each token that is not among `_prompt_ids`

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        place = self._place(token_id)
        if place == self._num:
            if self._num == len(self._ids):
                room = np.zeros(max(16, len(self._places)), np.int32)
                self._ids, self._counts = (np.concatenate([array, room]) for array in (self._ids, self._counts))
            self._ids[place] = token_id
            self._num += 1
        self._counts[place] += 1

    def _place(self, token_id: int) -> int:
        """Return the index of a token among the distinct tokens. A new token gets the next index, which is the number of distinct tokens
        so far."""
        place = int(self._prompt_ids.searchsorted(np.int32(token_id)))  # with an int, NumPy would convert the whole array to int64
        if place < len(self._prompt_ids) and self._prompt_ids[place] == token_id:
            return place
        return self._places.setdefault(token_id, self._num)

    @property
    def ids(self) -> Ids:
        return self._ids[: self._num]

    @property
    def counts(self) -> Ids:
        return self._counts[: self._num]


@dataclass(slots=True, eq=False)
class RowState:
    """The sampler's state of one sequence. `advance` is called for every appended token, forced ones included."""

    params: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    distinct_ids: Ids | None = None  # distinct tokens of the prompt to which the penalties apply; None: `__post_init__` finds them
    position: int = field(init=False)  # position in the sequence of the next token to draw
    is_plain: bool = field(init=False)  # the request has no bias and no penalties, which would change logits
    bias_ids: Ids = field(init=False)
    bias_values: NDArray[np.float32] = field(init=False)
    seen: PenalisedTokens | None = field(init=False)  # None: no penalties
    numbers: tuple[float, ...] = field(init=False)  # in the order of runtime.sampling.Number
    settings: tuple[int, ...] = field(init=False)  # in the order of runtime.sampling.Setting, with -1 for POSITION and MASK

    def __post_init__(self) -> None:
        params = self.params
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int32)
        self.bias_values = np.array([bias for _, bias in params.logit_bias], np.float32)
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if self.distinct_ids is None:
            self.distinct_ids = np.unique(np.asarray(self.prompt_ids, np.int32)) if params.repetition_penalty != 1.0 else NONE
        self.seen = PenalisedTokens(self.distinct_ids) if penalties != (1.0, 0.0, 0.0) else None
        sharpness = min(1 / params.temperature, SHARPEST) if params.temperature > 0 else 0.0
        reach = -math.log(params.min_p) if params.min_p > 0 else math.inf
        self.numbers = sharpness, reach, *penalties
        top_p, typical_p = (min(round(p * SHARE_ONE), SHARE_ONE) for p in (params.top_p, params.typical_p))
        seed = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
        top = -1 if params.logprobs is None else min(params.logprobs, NUM_TOP)
        self.settings = seed, -1, self.choice, params.top_k, top_p, typical_p, -1, top, int(params.processed_logprobs)
        self.is_plain = not params.logit_bias and self.seen is None
        self.position = len(self.prompt_ids)

    def anew(self, choice: int, token_ids: Iterable[int]) -> RowState:
        """Return the state of a choice of the same request that has generated the tokens `token_ids`."""
        row = RowState(self.params, choice, self.prompt_ids, self.distinct_ids)
        for token_id in token_ids:
            row.advance(token_id)
        return row

    def advance(self, token_id: int) -> None:
        """Count an appended token: the next draw is for the next position, and penalties apply to this token."""
        self.position += 1
        if self.seen is not None:
            self.seen.add(token_id)


class Sampler:
    """Draws tokens, and computes log-probabilities, on the device of a model."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        limits = model.limits
        self._same = _Same()
        self._masks: Mask = np.empty((limits.max_seqs, -(-limits.vocab_size // 32)), np.int32)

    def sample(
        self, logits: Logits, rows: Sequence[RowState], masks: Sequence[Mask | None] | None = None, places: Sequence[int] | None = None
    ) -> list[Drawn]:
        """Draw one token per row. Row i uses the logits at `places[i]` (default: i). `masks[i]` is the mask of the tokens that its
        constraint allows; None: all tokens."""
        return self.draw(logits, rows, self.prepare(rows, masks or [None] * len(rows), range(len(rows)) if places is None else places))

    def prepare(self, rows: Sequence[RowState], masks: Sequence[Mask | None], places: Sequence[int]) -> SampleBatch | None:
        """Return the arguments of `draw`, which can be prepared before there are logits. Return None if there are no rows. The next call
        overwrites the masks in the result."""
        return self._batch(rows, masks, places) if rows else None

    def draw(self, logits: Logits, rows: Sequence[RowState], batch: SampleBatch | None) -> list[Drawn]:
        """Draw a token for each of `rows`. `batch` is the result of `prepare` for these rows."""
        if batch is None:
            return []
        sampled = self._model.sample(logits, batch)
        tokens = sampled.tokens.tolist()
        return [self._drawn(row, token_id, sampled.logprobs, batch, i) for i, (row, token_id) in enumerate(zip(rows, tokens, strict=True))]

    def prompt_logprobs(self, logits: Logits, first: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Return the log-probabilities of prompt tokens, each with `num_top` alternatives, but at most NUM_TOP. Row `first + i` has the raw
        logits that predict token i."""
        rows = np.arange(first, first + len(token_ids), dtype=np.int32)
        tops = np.full(len(token_ids), min(num_top, NUM_TOP), np.int32)
        found = self._model.logprobs(logits, rows, np.array(token_ids, np.int32), tops)
        return [_logprob(token_id, found, i) for i, token_id in enumerate(token_ids)]

    def weigh(self, logits: Logits, place: int, token_ids: Sequence[int]) -> dict[int, float]:
        """Return the log-probability of each of `token_ids` by the raw logits of row `place`."""
        most = self._model.limits.max_seqs
        chunks = [np.array(token_ids[at : at + most], np.int32) for at in range(0, len(token_ids), most)]
        by_chunk = [
            (ids, self._model.logprobs(logits, np.full(len(ids), place, np.int32), ids, np.zeros(len(ids), np.int32))) for ids in chunks
        ]
        return {token_id: _logprob(token_id, found, i).logprob for ids, found in by_chunk for i, token_id in enumerate(ids.tolist())}

    def _batch(self, rows: Sequence[RowState], masks: Sequence[Mask | None], places: Sequence[int]) -> SampleBatch:
        """Build the arguments of a draw, which `prepare` returns. The parts that do not change are kept as long as the rows stay the same
        sequences."""
        if rows != self._same.rows:
            self._same = _Same.of(rows)
        settings = self._same.settings.copy()
        settings[:, Setting.POSITION] = [row.position for row in rows]
        num_masks = 0
        for i, mask in enumerate(masks):
            if mask is not None:
                self._masks[num_masks] = mask
                settings[i, Setting.MASK] = num_masks
                num_masks += 1
        lists = self._same.lists or _lists(rows)
        return SampleBatch(np.array(places, np.int32), self._same.numbers, settings, *lists, self._masks[:num_masks])

    def _drawn(self, row: RowState, token_id: int, logprobs: Logprobs, batch: SampleBatch, i: int) -> Drawn:
        """Return result i of the draw of a batch, which is `token_id` for `row`. A negative `token_id` is a code for why no token was
        drawn. Only an empty mask is the request's fault."""
        if token_id >= 0:
            return Drawn(token_id, None if row.params.logprobs is None else _logprob(token_id, logprobs, i))
        if token_id == NOT_A_NUMBER:
            code, why = ErrorCode.GENERATION_FAILED, "the model computed a logit that is NaN or positive infinity"
        elif self._may_draw(batch, i):
            code, why = ErrorCode.GENERATION_FAILED, "the model computed minus infinity for every token that may be drawn"
        else:
            code, why = ErrorCode.INVALID_VALUE, f"no token is left to draw: {EXCLUDING} together exclude every token"
        return Drawn(-1, error=SamplingError(code, why))

    def _may_draw(self, batch: SampleBatch, i: int) -> bool:
        """Return whether any token may be drawn for row i of a batch."""
        number = batch.settings[i, Setting.MASK]
        vocab_size = self._model.limits.vocab_size
        return number < 0 or bool(np.unpackbits(batch.masks[number].view(np.uint8), count=vocab_size, bitorder="little").any())


def _logprob(token_id: int, logprobs: Logprobs, i: int) -> TokenLogprob:
    """Return entry i of `logprobs` as the log-probability of a token. A distance is the difference between the largest logit and the
    token's logit; a total is the sum of the tokens' probabilities, scaled so that the most probable token has 2^WEIGHT_BITS. The result is
    NaN if the total is 0, which marks an entry that was not requested."""
    total = int(logprobs.totals[i])
    normaliser = math.log(total) - WEIGHT_BITS * math.log(2) if total else math.nan
    top_pairs = zip(logprobs.top_ids[i].tolist(), logprobs.top_distances[i].tolist(), strict=True)
    top = tuple((other, -distance - normaliser) for other, distance in top_pairs if other >= 0)
    return TokenLogprob(token_id, -float(logprobs.distances[i]) - normaliser, int(logprobs.ranks[i]), top)


@dataclass(frozen=True, slots=True)
class _Same:
    """The parts of a batch that stay the same as long as its rows are the same sequences."""

    rows: Sequence[RowState] = ()
    numbers: NDArray[np.float32] = field(default_factory=lambda: NONE.view(np.float32))
    settings: NDArray[np.int64] = field(default_factory=lambda: NONE.astype(np.int64))
    lists: Lists | None = None  # None: the lists change with each token, because a row has penalties

    @staticmethod
    def of(rows: Sequence[RowState]) -> _Same:
        """Return these parts for a batch with these rows."""
        numbers, settings = np.array([row.numbers for row in rows], np.float32), np.array([row.settings for row in rows], np.int64)
        return _Same(rows, numbers, settings, _lists(rows) if all(row.seen is None for row in rows) else None)


def _lists(rows: Sequence[RowState]) -> Lists:
    """Return the biases and the seen tokens of all rows as sparse lists."""
    seen = [row.seen for row in rows]
    return (
        *_listed([row.bias_ids for row in rows], [row.bias_values for row in rows]),
        *_listed([NONE if s is None else s.ids for s in seen], [NONE if s is None else s.counts for s in seen]),
    )


def _listed(ids: list[Ids], values: list[NDArray[Any]]) -> tuple[Ids, Ids, NDArray[Any]]:
    """Return where the entries of each row start, and the ids and the values of all rows, one row after the other. There is at least one
    row."""
    starts = np.zeros(len(ids) + 1, np.int32)
    if not any(map(len, ids)):
        return starts, ids[0], values[0]
    np.cumsum([len(own) for own in ids], out=starts[1:])
    return starts, np.concatenate(ids), np.concatenate(values)
