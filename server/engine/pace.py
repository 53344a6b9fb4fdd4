"""How many prompt tokens may ride along with the decoding streams, from what steps were measured to cost.

A step that also prefills is longer than one that only decodes, and every stream waits for it. The budget keeps the longer step
within `STRETCH` times the usual one. Both costs are medians of the last few steps: one step disturbed by the machine moves neither.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STRETCH = 2.0  # the promise is 2.5; the difference is for what the estimate does not see
SMALLEST = 16  # tokens: prefill goes on, however dear it is
UNKNOWN = 64  # tokens, until their cost has been seen
WINDOW = 15  # steps
FEWEST = 8  # prompt tokens for which a step says something about their cost


class Pace:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._decode_steps: deque[float] = deque(maxlen=WINDOW)
        self._token_costs: deque[float] = deque(maxlen=WINDOW)
        self._decode_s = 0.0
        self._token_s = 0.0

    def observe(self, num_decode: int, num_prefill: int, step_s: float) -> None:
        if num_prefill == 0 and num_decode > 0:
            self._decode_steps.append(step_s)
            self._decode_s = median(self._decode_steps)
        elif num_prefill >= FEWEST:
            self._token_costs.append(max(step_s - self._decode_s, 0.0) / num_prefill)
            self._token_s = median(self._token_costs)

    def prefill_budget(self, num_decode: int) -> int:
        if num_decode == 0:
            return self._max_tokens
        if not self._decode_steps:
            return 0  # one step without a prompt, to learn what the usual one costs
        if not self._token_costs:
            return UNKNOWN
        spare_s = (STRETCH - 1.0) * self._decode_s
        if self._token_s * self._max_tokens <= spare_s:
            return self._max_tokens
        return max(SMALLEST, int(spare_s / self._token_s))
