"""Compile and cache the grammars of one model, and open a matcher for each constrained sequence."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from server.constraints.compile_slots import CompileSlots
from server.constraints.grammar import Grammar
from server.constraints.isolated import IsolatedMatcher
from server.constraints.lazy import FirstGrammar, LazyMatcher
from server.constraints.matcher import ConstraintError, Matcher
from server.constraints.process.wire import GrammarSettings, Source
from server.constraints.process.zygote import Zygote
from server.messages import Constraint


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """The limits on the grammars of one model."""

    source_bytes: int = 256 << 10  # bytes of a constraint's source and head together: see `Constraint`
    compile_s: float = 3.0  # CPU time of compiling a grammar and computing its first mask; a schema of 1,000 fields takes 0.1 s
    grammar_size: int = 200_000  # symbols in the productions of a grammar
    # limit on the ways to parse the text so far; a schema with 1,000 optional fields has 4,000 ways, and then a token takes 6 ms
    row_items: int = 10_000
    # limit on the parser's steps for one mask; 400,000 take about 20 ms. GBNF grammars with one-character terminals need the most steps.
    step_items: int = 400_000
    initial_fuel: int = 5_000_000  # limit on the steps of building a lexer; 5,000,000 take about 0.1 s
    slow_s: float = 0.02  # CPU time allowed for each token; large schemas take a twentieth of that
    excess_s: float = 1.0  # CPU time beyond slow_s, summed over the tokens of a sequence
    memory_bytes: int = 128 << 20  # memory of one process that it does not share with the zygote
    num_compiling: int = 2  # grammars compiled at a time, so that one slow grammar does not hold up the next
    num_cached: int = 32  # compiled grammars in the cache; each is a process with about 2 MB of memory
    cached_bytes: int = 256 << 20  # memory of all cached grammars together


class ConstraintCompiler:
    """Opens matchers for constraints. Only one thread at a time may call its methods. No method but `close` blocks."""

    def __init__(
        self, read_tokenizer: Callable[[], bytes], *, eos_ids: Sequence[int], vocab_size: int, limits: ConstraintLimits | None = None
    ) -> None:
        """`read_tokenizer` returns the content of tokenizer.json; see `Zygote`."""
        self.limits = limits or ConstraintLimits()
        self._settings = GrammarSettings(
            list(eos_ids),
            vocab_size,
            grammar_size=self.limits.grammar_size,
            row_items=self.limits.row_items,
            step_items=self.limits.step_items,
            initial_fuel=self.limits.initial_fuel,
            compile_s=self.limits.compile_s,
            slow_s=self.limits.slow_s,
            excess_s=self.limits.excess_s,
            memory_bytes=self.limits.memory_bytes,
        )
        self._zygote = Zygote(self._settings, read_tokenizer)
        self._slots = CompileSlots(self.limits.num_compiling)
        # All grammars in use, by salt and source. The salt separates tenants, so that the time of compiling does not tell a tenant which
        # constraints other tenants use.
        self._grammars: weakref.WeakValueDictionary[tuple[str, Source], Grammar] = weakref.WeakValueDictionary()
        self._cached: OrderedDict[tuple[str, Source], Grammar] = OrderedDict()  # least recently used first; keeps its grammars alive

    def warm(self) -> None:
        """Start the zygote now, not with the first constraint, because loading the tokenizer of a large vocabulary takes a second."""
        with suppress(OSError):  # the first constraint tries again to start it
            self._zygote.start()

    def open(self, constraint: Constraint, token_ids: Sequence[int] = (), *, salt: str = "", key: str = "") -> Matcher:
        """Return a matcher for a sequence that has the tokens `token_ids` already. If a constraint without a trigger is faulty, the
        matcher's `poll` raises the error; a faulty one with a trigger leaves the text unconstrained. Only requests with the same salt share
        a compiled grammar. `key` identifies the API key; keys take turns at compiling."""
        if constraint.trigger is None:
            return IsolatedMatcher(self._grammar(constraint, constraint.source, salt, key), token_ids)
        marked, plain = (
            FirstGrammar([self._grammar(constraint, source, salt, key) for source in sources if source])
            for sources in ((constraint.source, constraint.fallback), (constraint.plain, constraint.plain_fallback))
        )
        return LazyMatcher(marked, plain, constraint.trigger, self._settings.vocab_size, token_ids)

    def close(self) -> None:
        """End the zygote, and with it all grammars."""
        self._zygote.close()

    def _grammar(self, constraint: Constraint, text: str, salt: str, key: str) -> Grammar:
        """Return the grammar for a text of a constraint: one that is in use or cached and has no error, or else a new one. A text that is
        too long gets a grammar whose `poll` raises the error. A constraint with a trigger only helps the model to write tool calls, and no
        client demands it. So if a schema in it cannot be compiled, the schema is weakened, and the constraint is not refused."""
        source = Source(constraint.kind, text, constraint.head, constraint.trigger is not None)
        grammar = self._grammars.get((salt, source))
        if grammar is None or grammar.error is not None:
            grammar = Grammar(source, self._settings, self._zygote, self._slots, self._keep, salt=salt, key=key)
            self._grammars[salt, source] = grammar
            num_bytes, most = len(text.encode()) + len(constraint.head.encode()), self.limits.source_bytes
            if num_bytes > most:
                grammar.error = ConstraintError(f"the {constraint.kind} has {num_bytes} bytes, expected at most {most}: shorten it")
        if grammar.is_compiled:
            self._keep(grammar)
        return grammar

    def _keep(self, grammar: Grammar) -> None:
        """Cache a compiled grammar as the most recently used one. While the cache has too many grammars or bytes, drop the least recently
        used grammar of the API key that has most grammars or bytes in the cache. So no key evicts the grammars of a key that has less in
        the cache. A grammar that is not compiled yet is kept alive only by the requests that wait for it."""
        self._cached[grammar.salt, grammar.source] = grammar
        self._cached.move_to_end((grammar.salt, grammar.source))
        while len(self._cached) > self.limits.num_cached:
            self._drop(Counter(one.key for one in self._cached.values()))
        while sum(one.memory_bytes for one in self._cached.values()) > self.limits.cached_bytes:
            num_bytes: Counter[str] = Counter()
            for one in self._cached.values():
                num_bytes[one.key] += one.memory_bytes
            self._drop(num_bytes)

    def _drop(self, taken: Counter[str]) -> None:
        """`taken`: by API key, the number of its cached grammars, or of their bytes. Drop the least recently used grammar of a key with the
        largest number."""
        most = max(taken.values())
        del self._cached[next(name for name, grammar in self._cached.items() if taken[grammar.key] == most)]
