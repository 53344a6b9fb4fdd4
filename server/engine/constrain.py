"""Constrained decoding: which tokens a schema, expression or grammar allows next, through llguidance.

Compiling happens on threads of its own, bounded in source size, in grammar size and in time. A matcher is advanced over every
token of its sequence. Where the grammar leaves one token only, the mask has one bit: taking such tokens without running the model
(`forced`) therefore gives the very tokens that drawing one by one would have given, on any schedule.

A constraint with a trigger is lazy: it governs what is behind that token until the grammar is met, and nothing else. It is an offer to
the model, not a demand of the client, so it never fails a request: what cannot be compiled or followed is free.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from server.messages import Constraint, ConstraintKind, Trigger


class ConstraintError(Exception):
    """A constraint that cannot be compiled; the message is for the client."""


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    source_bytes: int = 256 << 10
    compile_s: float = 10.0
    grammar_size: int = 200_000
    initial_fuel: int = 5_000_000  # about 0.1 s of building lexers
    num_cached: int = 128
    num_threads: int = 2  # one constraint that takes long does not hold up the next


class Matcher:
    """How far one sequence has come in its constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask: NDArray[np.int32] = np.empty(-(-vocab_size // 32), np.int32)

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> NDArray[np.int32]:
        """One bit per token, set where it may come next. Valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._require_sound()
        return self._mask

    def advance(self, token_ids: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(token_ids))
        self._require_sound()

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice."""
        return self._matcher.compute_ff_tokens()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())


class LazyMatcher:
    """Watches a sequence that is free but for what its trigger begins."""

    is_complete = False  # more text may always follow

    def __init__(self, grammar: LLMatcher | None, trigger: Trigger, vocab_size: int) -> None:
        self._grammar = grammar  # before its first token; None: nothing is ever restricted
        self._trigger = trigger
        self._vocab_size = vocab_size
        self._thinks = trigger.is_open
        self._begun: Matcher | None = None

    def mask(self) -> NDArray[np.int32] | None:
        """None where every token may come next."""
        try:
            return None if self._begun is None else self._begun.mask()
        except ConstraintError:
            self._begun = None
            return None

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._begun is not None:
                self._begun = _behind(self._begun, token_id)
            elif token_id in (self._trigger.open_id, self._trigger.close_id):
                self._thinks = token_id == self._trigger.open_id
            elif token_id == self._trigger.token_id and self._grammar is not None and not self._thinks:
                self._begun = Matcher(self._grammar.deep_copy(), self._vocab_size)

    def forced(self) -> list[int]:
        return [] if self._begun is None else self._begun.forced()


def _behind(begun: Matcher, token_id: int) -> Matcher | None:
    """None once the grammar is met, or left: a former worker may have drawn the token without it."""
    try:
        begun.advance([token_id])
    except ConstraintError:
        return None
    return None if begun.is_complete else begun


class ConstraintCompiler:
    def __init__(
        self,
        tokenizer_json: str,
        *,
        eos_ids: Sequence[int],
        vocab_size: int,
        limits: ConstraintLimits | None = None,
    ) -> None:
        self.limits = limits or ConstraintLimits()
        self._vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._cache: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="constraint")

    def compile(self, constraint: Constraint) -> Pending:
        """Begin to compile, or join who began before. To be called by one thread."""
        future = self._cache.get(constraint)
        if future is None or (future.done() and future.exception() is not None):
            future = self._cache[constraint] = self._pool.submit(self._build, constraint)
        self._cache.move_to_end(constraint)
        while len(self._cache) > self.limits.num_cached:
            self._cache.popitem(last=False)
        return Pending(future, constraint.trigger, self.limits.compile_s, self._vocab_size)

    def warm(self) -> None:
        """Build the tokenizer now rather than with the first constraint: on a large vocabulary that takes a second, in which no
        other Python code runs."""
        self._pool.submit(self._shared_tokenizer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, constraint: Constraint) -> LLMatcher:
        try:
            return self._compiled(constraint.kind, constraint.source)
        except ConstraintError:
            if not constraint.fallback:
                raise
            return self._compiled(constraint.kind, constraint.fallback)

    def _compiled(self, kind: ConstraintKind, source: str) -> LLMatcher:
        size = len(source.encode())
        if size > self.limits.source_bytes:
            raise ConstraintError(f"the {kind} has {size} bytes, expected at most {self.limits.source_bytes}: shorten it")
        bounds = LLParserLimits(
            initial_lexer_fuel=self.limits.initial_fuel, max_grammar_size=self.limits.grammar_size, verbose_errors=False
        )
        matcher = LLMatcher(self._shared_tokenizer(), _grammar(kind, source), log_level=0, limits=bounds)
        if matcher.is_error():
            raise ConstraintError(f"the {kind} cannot be compiled: {matcher.get_error()}")
        return matcher

    def _shared_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                eos_token = self._eos_ids or None
                try:
                    self._tokenizer = LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=eos_token)
                except ValueError as error:
                    raise ConstraintError(f"this model's tokenizer cannot be constrained: {error}") from error
            return self._tokenizer


class Pending:
    """A constraint on its way. `poll` gives a matcher of one's own, None before it is there, or raises ConstraintError."""

    def __init__(self, future: Future[LLMatcher], trigger: Trigger | None, limit_s: float, vocab_size: int) -> None:
        self._future = future
        self._trigger = trigger
        self._limit_s = limit_s
        self._give_up = time.monotonic() + limit_s
        self._vocab_size = vocab_size

    def poll(self) -> Matcher | LazyMatcher | None:
        done = self._future.done()
        if not done and time.monotonic() <= self._give_up:
            return None
        if self._trigger is not None:
            grammar = self._future.result() if done and self._future.exception() is None else None
            return LazyMatcher(grammar, self._trigger, self._vocab_size)
        if not done:
            raise ConstraintError(f"compiling the constraint took more than {self._limit_s:g} s: simplify it")
        return Matcher(self._future.result().deep_copy(), self._vocab_size)


def _grammar(kind: ConstraintKind, source: str) -> str:
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            if not isinstance(_parsed(source), dict):
                raise ConstraintError(f"the schema is {source[:80]}, expected a JSON object")
            return LLMatcher.grammar_from_json_schema(source)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(source))))
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(source)


def _choices(source: str) -> list[str]:
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ConstraintError(f"the choices are {source[:80]}, expected a JSON list of non-empty strings")
    return choices


def _parsed(source: str) -> object:
    try:
        return json.loads(source)
    except ValueError as error:
        raise ConstraintError(f"{source[:80]} is not JSON: {error}") from error
