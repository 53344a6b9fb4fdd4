"""How many prompt tokens a step takes beside the decoding streams.

All streams wait for the whole step. In total they wait for the prompts' work, in however many chunks it is done. Chunks below the
efficient size cost more per token; larger ones only make the first of several prompts wait for the others. So a step takes the efficient
chunk, or a smaller one if the step would else be longer than `max_gap_s`, which is the operator's bound. Chunks of several prompts share
it. A short chunk behind a long context takes longer than its tokens tell: the context is counted as further tokens. What a step costs is
measured when the model is loaded; later steps correct it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

SMALLEST = 16  # prompt tokens, where even they take longer than the bound: prompts go on
MOVES = 0.25  # of the difference between a step and its estimate: one disturbed step changes little
FURTHEST = 4.0  # between a step and its estimate: what is beyond says nothing about the next step
EFFICIENT = 1.03  # at most so much of the least cost per token
LEAST_SHARE = 2  # an efficient chunk is at least this part of the largest: smaller ones gain nobody time, and one measurement says little
RECENT = 64  # steps for which a size class keeps its correction


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps took when the model was loaded."""

    steps: Mapping[int, float] = field(default_factory=dict[int, float])  # seconds by number of tokens, of one prompt
    context_s: float = 0.0  # in addition, for each token of the context behind which a short chunk begins


class StepCosts:
    """Seconds of a step by its number of tokens: as measured at load, times the correction of its size class."""

    def __init__(self, steps: Mapping[int, float]) -> None:
        self._sizes = sorted(steps)
        self._seconds = [steps[size] for size in self._sizes]
        self._corrections: dict[int, tuple[float, int]] = {}  # by size class: the factor, and the step of its last observation
        self._latest = 1.0
        self._num_steps = 0

    def __call__(self, num_tokens: int) -> float:
        return self._as_measured(num_tokens) * self._correction(_size_class(num_tokens))

    def observe(self, num_tokens: int, step_s: float) -> None:
        self._num_steps += 1
        if not self._sizes:
            self._sizes, self._seconds = [num_tokens], [step_s]
        size, expected_s = _size_class(num_tokens), self(num_tokens)
        ratio = min(max(step_s / expected_s, 1 / FURTHEST), FURTHEST) if expected_s else 1.0
        moves = MOVES if size in self._corrections else 1.0
        self._latest = self._correction(size) * (1 + moves * (ratio - 1))
        self._corrections[size] = self._latest, self._num_steps

    def most_tokens(self, least: int, most: int, limit_s: float) -> int:
        """The largest number from `least` to `most` whose step stays within the limit; `least` if none does."""
        for size in range(_size_class(most), _size_class(least) - 1, -1):
            low, high = max(least, _first_of(size)), min(most, _first_of(size + 1) - 1)
            limit = limit_s / self._correction(size)
            if low <= high and self._as_measured(low) <= limit:
                return low + bisect_right(range(low, high + 1), limit, key=self._as_measured) - 1
        return least

    @property
    def efficient(self) -> int | None:
        """The smallest size whose tokens cost little more than those of the cheapest; None while nothing is known."""
        each_s = [seconds / size for size, seconds in zip(self._sizes, self._seconds, strict=True)]
        return next((size for size, s in zip(self._sizes, each_s, strict=True) if s <= EFFICIENT * min(each_s)), None)

    def _as_measured(self, num_tokens: int) -> float:
        """Linear between two sizes, in proportion beyond the largest; 0 while nothing is known."""
        sizes, seconds = self._sizes, self._seconds
        at = bisect_right(sizes, num_tokens)
        if at == 0:
            return seconds[0] if seconds else 0.0
        if at == len(sizes):
            return seconds[-1] * num_tokens / sizes[-1]
        share = (num_tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def _correction(self, size: int) -> float:
        """A class that was not seen of late is as fast or slow as what was: else a size once found too slow were never tried again."""
        factor, seen_at = self._corrections.get(size, (1.0, -RECENT))
        return factor if self._num_steps - seen_at < RECENT else self._latest


class Pace:
    def __init__(self, max_tokens: int, measured: Measured, max_gap_s: float) -> None:
        self._max_tokens = max_tokens
        self._max_gap_s = max_gap_s
        self._costs = StepCosts(measured.steps)
        chunk = self._costs.efficient
        self._chunk = max_tokens if chunk is None else max(chunk, max_tokens // LEAST_SHARE)
        self._context_tokens = 0.0 if chunk is None else measured.context_s * chunk / self._costs(chunk)

    def observe(self, num_tokens: int, step_s: float) -> None:
        self._costs.observe(num_tokens, step_s)

    def prefill_budget(self, num_decode: int) -> int:
        """Prompt tokens of a step beside so many streams."""
        most = self._max_tokens - num_decode
        chunk = min(self._chunk, most)
        if num_decode == 0 or chunk <= SMALLEST:
            return chunk
        return self._costs.most_tokens(num_decode + SMALLEST, num_decode + chunk, self._max_gap_s) - num_decode

    def context_tokens(self, context: int) -> int:
        """As many tokens of a prompt cost as much as to read this context for a short chunk."""
        return int(self._context_tokens * context)


def _size_class(num_tokens: int) -> int:
    """Two from one power of two to the next."""
    return int(2 * log2(num_tokens))


def _first_of(size: int) -> int:
    """The smallest number of tokens in a class."""
    num_tokens = max(int(2 ** (size / 2)), 1)
    return num_tokens if _size_class(num_tokens) == size else num_tokens + 1
