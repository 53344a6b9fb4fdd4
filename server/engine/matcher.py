"""How far one sequence has come in the grammar that governs it.

A matcher is advanced over every token of its sequence. Where the grammar leaves one token only, the mask has one bit: taking such tokens
without running the model (`forced`) therefore gives the very tokens that drawing one by one would have given, on any schedule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

# Every stream waits for a mask, and limits of llguidance's own count items, whatever one costs: what is bounded is the processor's time.
SLOW_S = 0.02  # for a token; those of large schemas take a twentieth
EXCESS_S = 1.0  # beyond that, in all tokens of a sequence together
TOO_SLOW = (
    f"its tokens took {EXCESS_S:g} s more than the {1000 * SLOW_S:g} ms that each may; write it so that a text can be read in one"
    ' way only, and repeat with `x*` or `xs: x | xs "," x`'
)


class ConstraintError(Exception):
    """A constraint that cannot be compiled or followed; the message is for the client."""


class ConstraintTooHeavy(ConstraintError):
    """Following it takes more of the processor, or of memory, than one request may ask for."""


class ConstraintLost(ConstraintError):
    """What followed it is gone, for a reason that is not the client's."""


class Matcher:
    """How far one sequence has come in its constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask: NDArray[np.int32] = np.empty(-(-vocab_size // 32), np.int32)
        self._excess_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> NDArray[np.int32]:
        """One bit per token, set where it may come next. Valid until the next call."""
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._require_sound(began_s)
        return self._mask

    def advance(self, token_ids: Sequence[int]) -> None:
        began_s = time.thread_time()
        self._matcher.consume_tokens(list(token_ids))
        self._require_sound(began_s, len(token_ids))

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice."""
        return self._matcher.compute_ff_tokens()

    def _require_sound(self, began_s: float, num_tokens: int = 1) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
        self._excess_s += max(time.thread_time() - began_s - num_tokens * SLOW_S, 0.0)
        if self._excess_s > EXCESS_S:
            raise ConstraintTooHeavy(TOO_SLOW)
