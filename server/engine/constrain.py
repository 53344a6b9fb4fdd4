"""Constrained decoding: which tokens a schema, expression or grammar allows next, through llguidance.

Compiling happens on threads of its own, bounded in source size, in grammar size and in time.
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

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.engine.lazy import LazyMatcher
from server.engine.matcher import ConstraintError, Matcher
from server.messages import Constraint, ConstraintKind, Trigger


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    source_bytes: int = 256 << 10
    compile_s: float = 10.0
    grammar_size: int = 200_000
    initial_fuel: int = 5_000_000  # about 0.1 s of building lexers
    num_cached: int = 128
    num_threads: int = 2  # one constraint that takes long does not hold up the next


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
        if self._future.done():
            if self._trigger is None:
                return Matcher(self._future.result().deep_copy(), self._vocab_size)
            grammar = self._future.result() if self._future.exception() is None else None
            return LazyMatcher(grammar, self._trigger, self._vocab_size)
        # What is only offered is waited for: whether it holds must not depend on how busy the machine is.
        if self._trigger is None and time.monotonic() > self._give_up:
            raise ConstraintError(f"compiling the constraint took more than {self._limit_s:g} s: simplify it")
        return None


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
