"""Constrained decoding: which tokens a schema, expression or grammar allows next, through llguidance.

Compiling happens on threads of its own, bounded in source size, in grammar size and in time; of grammars that clients wrote, in processes
of their own.
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

from server.engine.confined import ConfinedGrammar, ConfinedMatcher, GrammarProcess
from server.engine.grammars import Terms, open_matcher, open_tokenizer
from server.engine.lazy import LazyMatcher
from server.engine.matcher import EXCESS_S, SLOW_S, ConstraintError, Matcher
from server.messages import Constraint, ConstraintKind, Trigger

Compiled = LLMatcher | ConfinedGrammar
AnyMatcher = Matcher | LazyMatcher | ConfinedMatcher


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    source_bytes: int = 256 << 10
    compile_s: float = 10.0
    grammar_size: int = 200_000
    row_items: int = 10_000  # ways to read a text so far: 1,000 optional fields have 4,000, which take 6 ms a token
    initial_fuel: int = 5_000_000  # about 0.1 s of building lexers
    num_cached: int = 128
    num_threads: int = 2  # one constraint that takes long does not hold up the next
    memory_bytes: int = 256 << 20  # of a process of a client's grammar


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
        self._cache: OrderedDict[Constraint, Future[Compiled]] = OrderedDict()
        self._pool = ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="constraint")
        self._grammars = GrammarProcess(
            Terms(
                tokenizer_json,
                self._eos_ids,
                vocab_size,
                grammar_size=self.limits.grammar_size,
                initial_fuel=self.limits.initial_fuel,
                compile_s=self.limits.compile_s,
                slow_s=SLOW_S,
                excess_s=EXCESS_S,
                memory_bytes=self.limits.memory_bytes,
            )
        )
        self._waiting = ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="grammar")  # for processes

    def compile(self, constraint: Constraint) -> Pending:
        """Begin to compile, or join who began before. To be called by one thread."""
        future = self._cache.get(constraint)
        if future is None or (future.done() and not _is_of_use(future)):
            pool = self._waiting if constraint.by_client else self._pool
            future = self._cache[constraint] = pool.submit(self._build, constraint)
        self._cache.move_to_end(constraint)
        while len(self._cache) > self.limits.num_cached:
            self._cache.popitem(last=False)
        return Pending(future, constraint.trigger, self.limits.compile_s, self._vocab_size)

    def warm(self) -> None:
        """Build the tokenizer now rather than with the first constraint: on a large vocabulary that takes a second, in which no
        other Python code runs."""
        self._pool.submit(self._shared_tokenizer)

    def close(self) -> None:
        for pool in (self._pool, self._waiting):
            pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    def _build(self, constraint: Constraint) -> Compiled:
        if constraint.by_client:
            self._require_short(constraint.kind, constraint.source)
            return self._grammars.compile(constraint.source)
        try:
            return self._compiled(constraint.kind, constraint.source)
        except ConstraintError:
            if not constraint.fallback:
                raise
            return self._compiled(constraint.kind, constraint.fallback)

    def _require_short(self, kind: ConstraintKind, source: str) -> None:
        size = len(source.encode())
        if size > self.limits.source_bytes:
            raise ConstraintError(f"the {kind} has {size} bytes, expected at most {self.limits.source_bytes}: shorten it")

    def _compiled(self, kind: ConstraintKind, source: str) -> LLMatcher:
        self._require_short(kind, source)
        bounds = LLParserLimits(
            initial_lexer_fuel=self.limits.initial_fuel,
            max_grammar_size=self.limits.grammar_size,
            max_items_in_row=self.limits.row_items,
            verbose_errors=False,
        )
        try:
            return open_matcher(self._shared_tokenizer(), kind, _grammar(kind, source), bounds)
        except ValueError as error:
            raise ConstraintError(str(error)) from error

    def _shared_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = open_tokenizer(self._tokenizer_json, self._eos_ids, self._vocab_size)
            return self._tokenizer


class Pending:
    """A constraint on its way. `poll` gives a matcher of one's own, None before it is there, or raises ConstraintError."""

    def __init__(self, future: Future[Compiled], trigger: Trigger | None, limit_s: float, vocab_size: int) -> None:
        self._future = future
        self._trigger = trigger
        self._limit_s = limit_s
        self._give_up = time.monotonic() + limit_s
        self._vocab_size = vocab_size

    def poll(self) -> AnyMatcher | None:
        if self._future.done():
            if self._trigger is not None and self._future.exception() is not None:
                return LazyMatcher(None, self._trigger, self._vocab_size)
            compiled = self._future.result()
            if isinstance(compiled, ConfinedGrammar):
                return ConfinedMatcher(compiled)
            if self._trigger is None:
                return Matcher(compiled.deep_copy(), self._vocab_size)
            return LazyMatcher(compiled, self._trigger, self._vocab_size)
        # What is only offered is waited for: whether it holds must not depend on how busy the machine is.
        if self._trigger is None and time.monotonic() > self._give_up:
            raise ConstraintError(f"compiling the constraint took more than {self._limit_s:g} s: simplify it")
        return None


def _is_of_use(future: Future[Compiled]) -> bool:
    """Compiled, and its process there if it has one."""
    if future.exception() is not None:
        return False
    compiled = future.result()
    return not isinstance(compiled, ConfinedGrammar) or compiled.is_alive


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
