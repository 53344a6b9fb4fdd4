"""How many prompt tokens may ride along with the decoding streams, from what steps were measured to cost.

A step that also prefills is longer than one that only decodes, and every stream waits for it. For one prompt the longer step keeps
within `STRETCH` times the usual one. Each further one that waits gets `WEIGHT` times the share of a stream, up to `FURTHEST`: the streams
lose no more by it, only sooner, and the sooner all decode together, the more each step yields. The usual step is measured for about as
many streams as decode now, anew when it has long not been seen.

What a prompt token costs rises with their number: up to some, tokens are free beside the weights that are read anyway. So the number
at most doubles from one step to the next, which at most doubles the step, unless steps of prompts alone show what many cost. Estimates
take the cautious side of the last few steps: one that the machine disturbed moves them little, and a machine that is often disturbed
gets smaller chunks. Only the very last step counts by itself, too: a machine that has just become slow is slow in the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf, log2

STRETCH = 1.4  # the promise is 2.5; the difference is for what the estimates do not see
FURTHEST = 8.0
WEIGHT = 8.0  # who waits has nothing yet
SMALLEST = 4  # tokens: prefill goes on, however dear it is
WINDOW = 15  # steps that an estimate remembers
STALE = 400  # steps after which the usual step is measured anew
FEWEST = 4  # prompt tokens for which a step says something about their cost


class Pace:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_steps = 0
        self._usual: dict[int, _Usual] = {}  # by size class of the number of streams
        self._riding: deque[float] = deque(maxlen=WINDOW)  # seconds per prompt token beside streams
        self._chunks: deque[int] = deque(maxlen=WINDOW)  # how many these were
        self._alone: deque[float] = deque(maxlen=WINDOW)  # seconds per prompt token in steps of nothing else

    def observe(self, num_decode: int, num_prefill: int, step_s: float) -> None:
        self._num_steps += 1
        if num_prefill == 0:
            self._usual_of(num_decode).observe(step_s, self._num_steps)
        elif num_decode == 0 and num_prefill >= FEWEST:
            self._alone.append(step_s / num_prefill)
        elif num_prefill >= FEWEST:
            self._riding.append(max(step_s - self._usual_of(num_decode).step_s, 0.0) / num_prefill)
            self._chunks.append(num_prefill)

    def prefill_budget(self, num_decode: int, num_waiting: int) -> int:
        """`num_waiting`: prompts that are being computed, or could be if they were admitted."""
        if num_decode == 0:
            return self._max_tokens
        usual = self._usual_of(num_decode)
        if usual.is_stale(self._num_steps):
            return 0  # one step without a prompt, to learn what the usual one costs
        stretch = min(max(STRETCH, 1.0 + WEIGHT * (num_waiting - 1) / num_decode), FURTHEST)
        return int(min(max(self._affordable((stretch - 1.0) * usual.step_s), SMALLEST), self._max_tokens))

    def _affordable(self, spare_s: float) -> float:
        """Prompt tokens for so much time."""
        proven = max(2.0 * max(self._chunks, default=0), _count(spare_s, self._alone) if self._alone else 0.0)
        latest = list(self._riding)[-1:]
        return min(proven, _count(spare_s, self._riding), _count(spare_s, latest))

    def _usual_of(self, num_decode: int) -> _Usual:
        """Four classes from one power of two to the next."""
        return self._usual.setdefault(int(4 * log2(num_decode)), _Usual())


class _Usual:
    """Steps that only decode."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._seen_at = 0

    def observe(self, step_s: float, num_steps: int) -> None:
        if self.is_stale(num_steps):
            self._steps.clear()
        self._steps.append(step_s)
        self.step_s = _quantile(self._steps, 0.25)
        self._seen_at = num_steps

    def is_stale(self, num_steps: int) -> bool:
        return not self._steps or num_steps - self._seen_at > STALE


def _count(spare_s: float, costs: Iterable[float]) -> float:
    token_s = _quantile(costs, 0.75)
    return spare_s / token_s if token_s > 0 else inf


def _quantile(values: Iterable[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[int(len(ranked) * share)] if ranked else 0.0
