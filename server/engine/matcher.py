"""How far one sequence has come in the grammar that governs it.

A matcher is advanced over every token of its sequence. Where the grammar leaves one token only, the mask has one bit: taking such tokens
without running the model (`forced`) therefore gives the very tokens that drawing one by one would have given, on any schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

SLOW_S = 0.02  # of one processor's time, for a token: twenty times what those of large schemas take
EXCESS_S = 1.0  # beyond that, in all tokens of a sequence together
BOUNDS = ("Too many items", "items; max is", "lexer error")  # how llguidance says that it met a limit of its own
REMEDY = (
    'write it so that a text can be read in one way only, and repeat with `x*` or `xs: x | xs "," x` rather than by rules that end'
    " with themselves"
)


class ConstraintError(Exception):
    """A constraint that cannot be compiled or followed; the message is for the client."""


class ConstraintTooComplex(ConstraintError):
    """Following it takes more work than one request may ask for."""

    @classmethod
    def by_time(cls) -> ConstraintTooComplex:
        return cls(f"its tokens took {EXCESS_S:g} s more than the {1000 * SLOW_S:g} ms that each may: {REMEDY}")


class Grammar:
    """A compiled constraint. Copies of its matcher share a lexer behind a lock, so while one is `busy` none other may be touched."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.is_spoiled = False  # compile it anew for the next request
        self._matcher = matcher
        self._busy = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._busy.is_set()

    def occupy(self) -> None:
        self._busy.set()

    def release(self) -> None:
        self._busy.clear()

    def copy(self) -> LLMatcher:
        return self._matcher.deep_copy()


class Matcher:
    """How far one sequence has come in its constraint."""

    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self.grammar = grammar
        self._matcher = grammar.copy()
        self._mask: NDArray[np.int32] = np.empty(-(-vocab_size // 32), np.int32)
        self.has_mask = False  # for the next token
        self._excess_s = 0.0
        self._was_slow = False

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_slow(self) -> bool:
        """Its mask is yet to be made, and the last one took long."""
        return self._was_slow and not self.has_mask

    def mask(self) -> NDArray[np.int32]:
        """One bit per token, set where it may come next. Valid until the next call."""
        if not self.has_mask:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self._require_sound()
            self._was_slow = self._charge(started) > SLOW_S
            self.has_mask = True
        return self._mask

    def advance(self, token_ids: Sequence[int]) -> None:
        self.has_mask = False
        started = time.thread_time()
        self._matcher.consume_tokens(list(token_ids))
        self._require_sound()
        self._charge(started, len(token_ids))

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice."""
        return self._matcher.compute_ff_tokens()

    def _charge(self, started: float, num_tokens: int = 1) -> float:
        """Of the processor's time and not of the clock's: whether a request fails must not depend on what else the machine does."""
        took = time.thread_time() - started
        self._excess_s += max(took - SLOW_S * num_tokens, 0.0)
        if self._excess_s > EXCESS_S:
            self.grammar.is_spoiled = True
            raise ConstraintTooComplex.by_time()
        return took

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().removesuffix("\n<non-verbose/>")
            if any(bound in error for bound in BOUNDS):
                self.grammar.is_spoiled = True
                raise ConstraintTooComplex(f"{error}. Remedy: {REMEDY}")
            raise ConstraintError(error)
