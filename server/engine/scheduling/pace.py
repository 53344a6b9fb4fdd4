"""The pace of prefill: how many prompt tokens a step takes in addition to the tokens of decoding sequences.

A decoding sequence waits for each whole step. Over all steps it waits for all work on prompts, whatever the size of their chunks. Chunks
below the efficient size (`StepCosts.efficient`) cost more per token; larger chunks are hardly cheaper per token, and delay the first of
several prompts. So a step takes prompt tokens of the efficient size in all, or fewer if the step would take longer than `max_gap_s`, the
operator's bound. A short chunk after a long context takes longer than its number of tokens suggests, so the context is counted as further
tokens. The costs of steps are measured when the model is loaded, and corrected by later steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2

SMALLEST = 16  # a step may always take this many prompt tokens, even if it exceeds `max_gap_s`, so that prompts make progress
MOVES = 0.25  # weight with which each observation after the first changes a correction, so that one disturbed step changes it little
FURTHEST = 4.0  # largest factor by which an observed step counts as slower or faster than its estimate
EFFICIENT = 1.03  # a size is efficient if its cost per token is at most this factor times the least cost per token
LEAST_SHARE = 2  # the efficient size counts as at least max_tokens // LEAST_SHARE, as one noisy measurement may suggest less
SLOWEST = 40.0  # a step that takes this many times its cost has stalled; busy machines slow a worker down by a factor of 20
UNKNOWN_S = 600.0  # the limit of a step whose cost is unknown
IDLE_SHARE = 0.01  # idle sequences may lengthen the steps of other sequences by this share of their time, on average
IDLE_STEP_S = 0.05  # longest step of idle sequences alone, unless two of the shortest steps take longer
IDLE_STEP_SHARE = 0.1  # a step of idle sequences alone may take this share of the time of such steps since the last step of other sequences
ALONE_S = 0.05  # if no sequence decodes, excerpts may be encoded for at least this time between two checks for new requests
RECENT = 64  # steps after which the correction of a size class expires


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs of steps, measured when the model was loaded."""

    steps: Mapping[int, float] = field(default_factory=dict[int, float])  # tokens of one prompt -> seconds of a step with them
    context_s: float = 0.0  # additional seconds of a short chunk for each token of the context before it
    # by medium, "image" or "audio": seconds to encode the `example` of the medium's ExcerptLimits
    excerpts_s: Mapping[str, float] = field(default_factory=dict[str, float])


class StepCosts:
    """Seconds of a step by its number of tokens: the cost measured at load, times a correction for the size class of the step (two classes
    per power of two). If nothing was measured at load, the first step is the measurement, and costs are 0 until then."""

    def __init__(self, steps: Mapping[int, float]) -> None:
        self._steps = dict(sorted(steps.items()))
        self._corrections: dict[int, tuple[float, int]] = {}  # by size class: the factor, and `_num_steps` at the last observation
        self._latest = 1.0  # the correction that was changed last, of any size class
        self._num_steps = 0  # steps that were observed

    def __call__(self, num_tokens: int) -> float:
        return self._as_measured(num_tokens) * self._correction(_size_class(num_tokens))

    def limit_s(self, num_tokens: int) -> float:
        """Return how long a step may take before it counts as stalled: UNKNOWN_S before anything was measured."""
        if not self._steps:
            return UNKNOWN_S
        return SLOWEST * max(self(num_tokens), self._as_measured(num_tokens))

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Correct the costs by a step of `num_tokens` tokens that took `step_s` seconds."""
        self._num_steps += 1
        if not self._steps:
            self._steps = {num_tokens: step_s}
        size, expected_s = _size_class(num_tokens), self(num_tokens)
        ratio = min(max(step_s / expected_s, 1 / FURTHEST), FURTHEST) if expected_s else 1.0
        moves = MOVES if size in self._corrections else 1.0
        self._latest = self._correction(size) * (1 + moves * (ratio - 1))
        self._corrections[size] = self._latest, self._num_steps

    def most_tokens(self, least: int, most: int, limit_s: float) -> int:
        """Return the largest number of tokens from `least` to `most` whose step takes at most `limit_s`, or `least` if there is no such
        number."""
        for size in range(_size_class(most), _size_class(least) - 1, -1):
            low, high = max(least, _first_of(size)), min(most, _first_of(size + 1) - 1)
            limit = limit_s / self._correction(size)
            if low <= high and self._as_measured(low) <= limit:
                return low + bisect_right(range(low, high + 1), limit, key=self._as_measured) - 1
        return least

    def efficient(self, most: int) -> int | None:
        """Return the smallest size whose cost per token is close to the least cost per token, or None before anything was measured. The
        sizes compared are the measured ones, and larger ones up to `most`, whose costs are extrapolated."""
        if not self._steps:
            return None
        sizes = [*self._steps, *_larger_sizes(max(self._steps), most)]
        each_s = {size: self._as_measured(size) / size for size in sizes}
        return next(size for size, s in each_s.items() if s <= EFFICIENT * min(each_s.values()))

    def _as_measured(self, num_tokens: int) -> float:
        """Interpolate linearly between two measured sizes, and extrapolate beyond the largest. Steps below the smallest measured size take
        as long as those of this size. Return 0 before anything was measured."""
        if not self._steps:
            return 0.0
        num_tokens = max(num_tokens, min(self._steps))
        for (less, less_s), (more, more_s) in pairwise(self._steps.items()):
            if num_tokens < more:
                return less_s + (num_tokens - less) / (more - less) * (more_s - less_s)
        return extrapolated_s(self._steps, num_tokens)

    def _correction(self, size: int) -> float:
        """Return the correction of a size class. If it was not observed, or its last observation is too old, return the latest correction
        of any class. Without the expiry, a size once found too slow would never be tried again."""
        factor, seen_at = self._corrections.get(size, (1.0, -RECENT))
        return factor if self._num_steps - seen_at < RECENT else self._latest


class Pace:
    """Decides how many tokens of prompts and of idle sequences a step takes, and for how long excerpts are encoded before it."""

    def __init__(self, max_tokens: int, measured: Measured, max_gap_s: float) -> None:
        """A step has at most `max_tokens` tokens. `max_gap_s` is the operator's bound for a step with decoding sequences."""
        self._max_tokens = max_tokens
        self._max_gap_s = max_gap_s
        self._costs = StepCosts(measured.steps)
        chunk = self._costs.efficient(max_tokens)
        self._chunk = max_tokens if chunk is None else max(chunk, max_tokens // LEAST_SHARE)
        tokens_per_s = 0.0 if chunk is None else chunk / self._costs(chunk)
        self._context_tokens = measured.context_s * tokens_per_s
        self._excerpt_tokens = {medium: max(1, round(example_s * tokens_per_s)) for medium, example_s in measured.excerpts_s.items()}
        self._owed_s = 0.0  # seconds by which idle sequences may lengthen the next steps of other sequences; below 0: a debt
        self._alone_s = 0.0  # seconds of the steps of idle sequences alone since the last step of other sequences

    def observe(self, num_tokens: int, step_s: float, num_idle: int = 0) -> None:
        """Correct the costs by a step of `num_tokens` tokens, `num_idle` of them of idle sequences. Charge idle sequences for the time by
        which they lengthened the step, and grant them a share of the time that the other tokens take."""
        num_live = num_tokens - num_idle
        if num_idle:
            self.charge_idle(num_live, step_s)
        if num_live:
            live_s = self._costs(num_live)
            self._owed_s = min(self._owed_s + IDLE_SHARE * min(step_s, live_s), live_s)
            self._alone_s = 0.0
        self._costs.observe(num_tokens, step_s)

    def charge_idle(self, num_live: int, step_s: float) -> None:
        """Charge idle sequences for the time by which they lengthened a step with `num_live` tokens of other sequences, or for the whole
        step if `num_live` is 0. The measured time is charged, because a prediction that is 10 % too low would slow down each step."""
        self.charge_idle_further(num_live, max(step_s - self._costs(num_live), 0.0) if num_live else step_s)

    def charge_idle_further(self, num_live: int, further_s: float) -> None:
        """Charge idle sequences for `further_s`, by which they lengthened a step with `num_live` tokens of other sequences. If `num_live`
        is 0, add `further_s` to the time of the steps of idle sequences alone instead."""
        if num_live:
            self._owed_s -= further_s
            self._alone_s = 0.0
        else:
            self._alone_s += further_s

    def limit_s(self, num_tokens: int) -> float:
        """Return how long a step may take before it counts as stalled."""
        return self._costs.limit_s(num_tokens)

    def prompt_s(self, num_tokens: int) -> float:
        """Return about how long the prefill of `num_tokens` tokens (at least one) takes if nothing else runs, or 0 before anything was
        measured."""
        num_steps = num_tokens / min(self._chunk, num_tokens)
        return num_steps * self._costs(min(self._chunk, num_tokens))

    def prefill_budget(self, num_decode: int, *, is_halved: bool = False) -> int:
        """Return how many prompt tokens a step may take if it also runs `num_decode` tokens of decoding sequences: SMALLEST or more, if it
        has room for them. With `is_halved`, leave half of `max_gap_s` for encoding excerpts."""
        most = self._max_tokens - num_decode
        chunk = min(self._chunk, most)
        if num_decode == 0 or chunk <= SMALLEST:
            return chunk
        gap_s = self._max_gap_s / 2 if is_halved else self._max_gap_s
        return self._costs.most_tokens(num_decode + SMALLEST, num_decode + chunk, gap_s) - num_decode

    def idle_budget(self, num_live: int) -> int:
        """Return how many tokens of idle sequences a step may take. In a step with `num_live` tokens of other sequences, they may take the
        time that `observe` has granted them. A step of idle sequences alone must be short, because the next request waits for it. Right
        after a step of other sequences, it may take only as long as the shortest step, because busy clients pause only briefly between
        requests. Later it may take up to IDLE_STEP_S or, if that is longer, twice the time of the shortest step."""
        most = self._max_tokens - num_live
        if num_live:
            if self._owed_s <= 0.0:
                return 0
            return self._costs.most_tokens(num_live, num_live + most, self._costs(num_live) + self._owed_s) - num_live
        shortest_s = self._costs(1)
        longest_s = max(IDLE_STEP_S, 2 * shortest_s)
        return self._costs.most_tokens(1, most, min(max(IDLE_STEP_SHARE * self._alone_s, shortest_s), longest_s))

    def encoding_s(self, num_tokens: int, num_decode: int) -> float:
        """Return for how long excerpts may be encoded before a step of `num_tokens` tokens. If `num_decode` of these are tokens of decoding
        sequences, the encoding and the step together take at most `max_gap_s`, and the encoding takes at most 1 / (EFFICIENT - 1) times as
        long as the step: a longer encoding would hardly be more efficient, because the step is already a small share of the time. If no
        sequence decodes, the encoding may take as long as the step, so that prompts and excerpts share the machine, and always at least
        ALONE_S."""
        step_s = self._costs(num_tokens) if num_tokens else 0.0
        if num_decode == 0:
            return max(ALONE_S, step_s)
        return max(0.0, min(self._max_gap_s - step_s, step_s / (EFFICIENT - 1)))

    def context_tokens(self, context: int) -> int:
        """Return the number of prompt tokens that cost as much as reading the `context` tokens before a short chunk."""
        return int(self._context_tokens * context)

    def excerpt_tokens(self, medium: str, estimated: int) -> int:
        """Return the number of prompt tokens that cost as much as encoding the `example` of the medium's ExcerptLimits. Return `estimated`
        if that was not measured."""
        return self._excerpt_tokens.get(medium, estimated)


def extrapolated_s(steps: Mapping[int, float], size: int) -> float:
    """Return the seconds of a step of `size` tokens. The sizes in `steps` are in ascending order, and none is larger than `size`. Each
    token beyond the largest size takes as long as a token between the two largest sizes, or between 0 and the only size."""
    (less, less_s), (largest, longest_s) = [(0, 0.0), *steps.items()][-2:]
    return longest_s + max(longest_s - less_s, 0.0) / (largest - less) * (size - largest)


def _size_class(num_tokens: int) -> int:
    """Return the size class of a number of tokens. There are two classes per power of two."""
    return int(2 * log2(num_tokens))


def _larger_sizes(size: int, most: int) -> Iterator[int]:
    """Yield 1.5, 2, 3, 4, 6, 8, ... times `size` while that is less than `most`, then `most` if it is larger than `size`."""
    while size < most:
        yield from (larger for larger in (size + size // 2, 2 * size) if size < larger < most)
        size *= 2
        if size >= most:
            yield most


def _first_of(size: int) -> int:
    """Return the smallest number of tokens in a size class."""
    num_tokens = max(int(2 ** (size / 2)), 1)
    return num_tokens if _size_class(num_tokens) == size else num_tokens + 1
