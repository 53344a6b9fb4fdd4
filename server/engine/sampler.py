"""From a row of logits to a token: the meaning of every sampling parameter, one row at a time.

A row is worked on alone, in float64 and always in the same scratch memory, so that neither its neighbours nor its address can
change a bit of the result. The order of the steps is part of the meaning:

    bias -> repetition, frequency and presence penalties -> bans, minimum length, end of thoughts, constraint
    -> temperature -> top_k -> top_p -> min_p -> typical_p -> draw

Each truncation looks at what the one before it left, renormalised. Among equal logits the lower token id counts as the higher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from server.engine.philox import uniform
from server.engine.watch import Watch
from server.messages import SamplingParams, TokenLogprob

Logits = NDArray[np.float32]
Bitmask = NDArray[np.int32]  # [ceil(vocab / 32)] bit set: allowed
Ids = NDArray[np.intp]

BLOCK = 128  # weights added up at once: running sums over a whole vocabulary would take three times as long as all the rest


class SamplingError(Exception):
    """No token can be drawn from this row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Drawn:
    token_id: int
    logprob: TokenLogprob | None = None
    error: SamplingError | None = None


@dataclass(slots=True, eq=False)
class RowState:
    """What the sampler remembers of one sequence; `advance` is called for every token that joins it, forced ones included."""

    params: SamplingParams
    choice: int
    eos_ids: tuple[int, ...]
    prompt_ids: Sequence[int]
    num_drawn: int = 0
    counts: dict[int, int] = field(default_factory=dict[int, int])
    _allowed: Ids = field(init=False)
    _banned: Ids = field(init=False)
    _enders: Ids = field(init=False)
    _bias: tuple[Ids, NDArray[np.float64]] = field(init=False)
    _prompt: Ids = field(init=False)
    ender_ids: frozenset[int] = field(init=False)  # they end the sequence, once min_tokens are drawn
    watch: Watch = field(init=False)
    is_plain: bool = field(init=False)  # logits reach the draw unchanged, once min_tokens is over

    def __post_init__(self) -> None:
        params = self.params
        self._allowed = _ids(params.allowed_token_ids)
        self._banned = _ids(params.banned_token_ids)
        enders = params.stop_token_ids + (() if params.ignore_eos else self.eos_ids)
        self._enders = _ids(enders)
        self.ender_ids = frozenset(enders)
        self._bias = _ids([i for i, _ in params.logit_bias]), np.array([b for _, b in params.logit_bias], np.float64)
        self._prompt = np.unique(_ids(self.prompt_ids)) if params.repetition_penalty != 1.0 else _ids(())
        self.watch = Watch(params)
        bans = params.allowed_token_ids or params.banned_token_ids or self.watch.is_needed
        self.is_plain = not (params.logit_bias or bans or self._penalises)

    @property
    def _penalises(self) -> bool:
        params = self.params
        return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def holds_back_end(self) -> bool:
        return self.num_drawn < self.params.min_tokens

    @property
    def position(self) -> int:
        """Of the token to draw next, in its sequence."""
        return len(self.prompt_ids) + self.num_drawn

    def advance(self, token_id: int) -> None:
        self.num_drawn += 1
        if self._penalises:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1
        self.watch.advance(token_id)

    def adjust(self, logits: NDArray[np.float64], mask: Bitmask | None) -> None:
        """In place: bias, penalties, bans."""
        params = self.params
        ids, bias = self._bias
        np.add.at(logits, ids, bias)
        if self._penalises:
            drawn = np.fromiter(self.counts, np.intp, len(self.counts))
            if params.repetition_penalty != 1.0:
                seen = np.union1d(self._prompt, drawn)
                values = logits[seen]
                logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            counts = np.fromiter(self.counts.values(), np.float64, len(self.counts))
            logits[drawn] -= params.frequency_penalty * counts + params.presence_penalty
        if len(self._allowed):
            _keep_only(logits, self._allowed)
        logits[self._banned] = -np.inf
        logits[_ids(self.watch.banned())] = -np.inf
        if self.holds_back_end:
            logits[self._enders] = -np.inf
        if (demanded := self.watch.demanded()) is not None:
            _keep_only(logits, _ids([demanded]))
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
            logits[bits == 0] = -np.inf


class Sampler:
    def __init__(self, vocab_size: int) -> None:
        self._scratch = np.empty(vocab_size, np.float64)
        self._weights = np.empty(-(-vocab_size // BLOCK) * BLOCK, np.float64)

    def sample(self, logits: Logits, rows: Sequence[RowState], masks: Sequence[Bitmask | None] | None = None) -> list[Drawn]:
        """One token per row of `logits` [r, vocab]."""
        results: list[Drawn] = []
        for i, row in enumerate(rows):
            try:
                results.append(self._draw(logits[i], row, None if masks is None else masks[i]))
            except SamplingError as error:
                results.append(Drawn(-1, error=error))
        return results

    def prompt_logprob(self, logits: Logits, token_id: int, num_top: int) -> TokenLogprob:
        """The log-probability of a token of the prompt, given the raw logits before it."""
        np.copyto(self._scratch, logits)
        return self._logprob(self._scratch, token_id, num_top)

    def _draw(self, raw: Logits, row: RowState, mask: Bitmask | None) -> Drawn:
        params = row.params
        plain = row.is_plain and mask is None and not row.holds_back_end
        if plain and params.temperature == 0 and params.logprobs is None:
            token_id = int(raw.argmax())
            _require_drawable(float(raw[token_id]))
            return Drawn(token_id)

        logits = self._scratch
        np.copyto(logits, raw)
        if not plain:
            row.adjust(logits, mask)
        best = int(logits.argmax())
        _require_drawable(float(logits[best]))
        if params.temperature == 0:
            token_id, kept = best, None
        else:
            if params.temperature != 1.0:
                logits /= params.temperature
            kept = self._truncate(logits, float(logits[best]), params)
            token_id = self._pick(logits, float(logits[best]), kept, uniform(params.seed, row.position, row.choice))
        if params.logprobs is None:
            return Drawn(token_id)
        if not params.processed_logprobs:
            np.copyto(logits, raw)
        elif kept is not None:
            values = logits[kept]
            logits.fill(-np.inf)
            logits[kept] = values
        return Drawn(token_id, self._logprob(logits, token_id, params.logprobs))

    def _truncate(self, logits: NDArray[np.float64], best: float, params: SamplingParams) -> Ids | None:
        """The ids that may be drawn, ascending; None for all."""
        kept: Ids | None = None
        if 0 < params.top_k < len(logits):
            kept = _largest(logits, params.top_k)
        if params.top_p < 1.0:
            kept = self._nucleus(logits, best, kept, params.top_p)
        if params.min_p > 0.0:
            ids = np.arange(len(logits)) if kept is None else kept
            kept = ids[logits[ids] >= best + np.log(params.min_p)]
        if params.typical_p < 1.0:
            kept = _typical(logits, best, kept, params.typical_p)
        return kept

    def _nucleus(self, logits: NDArray[np.float64], best: float, kept: Ids | None, top_p: float) -> Ids:
        """The fewest most probable ids that hold a mass of `top_p`."""
        weights = self._weigh(logits, best, kept)
        distance = best - (logits if kept is None else logits[kept])
        chosen = _nearest(distance, weights, top_p * float(weights.sum()), bounds=(4.0, 8.0, 12.0))
        return chosen if kept is None else kept[chosen]

    def _pick(self, logits: NDArray[np.float64], best: float, kept: Ids | None, u: float) -> int:
        """Invert the cumulative weights, ids ascending: first over the sums of blocks, then within one."""
        num_kept = len(self._weigh(logits, best, kept))
        blocks = self._weights[: -(-num_kept // BLOCK) * BLOCK].reshape(-1, BLOCK)
        blocks.reshape(-1)[num_kept:] = 0.0
        sums = np.cumsum(blocks.sum(axis=1))
        target = u * sums[-1]
        block = _first_above(sums, target)
        within = np.cumsum(blocks[block])
        i = block * BLOCK + _first_above(within, target - (sums[block - 1] if block else 0.0))
        return i if kept is None else int(kept[i])

    def _weigh(self, logits: NDArray[np.float64], best: float, kept: Ids | None) -> NDArray[np.float64]:
        weights = self._weights[: len(logits) if kept is None else len(kept)]
        np.subtract(logits if kept is None else logits[kept], best, out=weights)
        return np.exp(weights, out=weights)

    def _logprob(self, logits: NDArray[np.float64], token_id: int, num_top: int) -> TokenLogprob:
        best = float(logits.max())
        normaliser = best + float(np.log(self._weigh(logits, best, None).sum()))
        value = logits[token_id]
        rank = 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))
        top = _largest(logits, num_top)
        top = top[np.argsort(-logits[top], kind="stable")]
        pairs = tuple((int(i), float(logits[i]) - normaliser) for i in top if logits[i] > -np.inf)
        return TokenLogprob(token_id, float(value) - normaliser, rank, pairs)


def _keep_only(logits: NDArray[np.float64], ids: Ids) -> None:
    kept = logits[ids]
    logits.fill(-np.inf)
    logits[ids] = kept


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """Where the running sums first exceed the target; rounding must not lead past the last that grows."""
    return int(min(np.searchsorted(sums, target, side="right"), np.searchsorted(sums, sums[-1], side="left")))


def _largest(logits: NDArray[np.float64], num_largest: int) -> Ids:
    """The ids of the largest logits, ascending; of equal ones at the edge the lowest ids."""
    if num_largest <= 0:
        return _ids(())
    if num_largest >= len(logits):
        return np.arange(len(logits))
    edge = np.partition(logits, len(logits) - num_largest)[len(logits) - num_largest]
    above = np.flatnonzero(logits > edge)
    at_edge = np.flatnonzero(logits == edge)[: num_largest - len(above)]
    return np.sort(np.concatenate([above, at_edge]))


def _typical(logits: NDArray[np.float64], best: float, kept: Ids | None, typical_p: float) -> Ids:
    """The fewest ids whose surprise is nearest to the entropy and that hold a mass of `typical_p` (Meister et al., 2022)."""
    ids = np.flatnonzero(logits > -np.inf) if kept is None else kept[logits[kept] > -np.inf]
    shifted = logits[ids] - best
    weights = np.exp(shifted)
    surprise = np.log(weights.sum()) - shifted
    probs = weights / weights.sum()
    distance = np.abs(surprise - (probs * surprise).sum())
    return ids[_nearest(distance, probs, typical_p, bounds=(0.5, 1.0, 2.0, 4.0))]


def _nearest(distance: NDArray[np.float64], weights: NDArray[np.float64], target: float, *, bounds: tuple[float, ...]) -> Ids:
    """Indices by distance, the lower first among equals, until their weights reach the target; ascending. Sorting is what takes
    time, so it begins with those within the first bound; what lies beyond a bound follows all within it."""
    for bound in (*bounds, np.inf):
        near = np.flatnonzero(distance <= bound)
        if bound < np.inf and float(weights[near].sum()) < target:
            continue
        near = near[np.argsort(distance[near], kind="stable")]
        mass = np.cumsum(weights[near])
        num_chosen = int(np.searchsorted(mass, target, side="left")) + 1
        if num_chosen <= len(near):
            return np.sort(near[:num_chosen])
    return np.arange(len(weights))  # rounding left the sum of all below the target


def _require_drawable(best: float) -> None:
    if np.isnan(best):
        raise SamplingError("generation_failed", "the model computed a logit that is not a number")
    if best == -np.inf:
        raise SamplingError(
            "generation_failed",
            "no token is left to draw: allowed and banned tokens, min_tokens and the constraint exclude each other",
        )


def _ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.intp)
