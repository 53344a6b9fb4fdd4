"""The masks of a step, made on a thread of their own. One that takes long is left behind with its thread, and no other row waits for it.

llguidance cannot be interrupted, and what it does for a mask has no useful bound: under all of its limits, 200 rules like `e: e e | "a"`
take it 20 s where tokens are long. A sequence whose mask is late waits outside of the steps, and fails when that takes more than it may.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Sequence

from server.engine.lazy import LazyMatcher
from server.engine.matcher import EXCESS_S, SLOW_S, ConstraintTooComplex, Grammar, Matcher
from server.engine.sampler import Bitmask

AnyMatcher = Matcher | LazyMatcher
Made = Bitmask | Exception | None
PATIENCE_S = 0.05  # of a step with one mask; who is left behind loses little, so it may happen to any on a busy machine
NICE = 10  # of threads left behind


class MaskMaker:
    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Work | None] | None = None  # of the present thread
        self._late: dict[Grammar, Late] = {}

    def make(self, matchers: Sequence[AnyMatcher]) -> list[Made | Late]:
        """Of each a mask, what went wrong, or a mask on its way: its own, or that of another with the same grammar."""
        self._late = {grammar: late for grammar, late in self._late.items() if grammar.is_busy}
        made: dict[int, Made | Late] = {i: matcher.mask() for i, matcher in enumerate(matchers) if matcher.has_mask}
        while todo := [i for i, matcher in enumerate(matchers) if i not in made and matcher.grammar not in self._late]:
            quick = [i for i in todo if not matchers[i].is_slow]
            turn = quick or todo[:1]
            work = self._begin([matchers[i] for i in turn])
            num_made = work.wait(PATIENCE_S if quick else 0.0)
            made.update(zip(turn, work.made[:num_made], strict=False))
            if num_made < len(turn):
                made[turn[num_made]] = self._leave(work, num_made, matchers[turn[num_made]].grammar)
        return [made[i] if isinstance(made.get(i), Late) else self._others(matcher) or made[i] for i, matcher in enumerate(matchers)]

    def close(self) -> None:
        if self._orders is not None:
            self._orders.put(None)

    def _begin(self, matchers: Sequence[AnyMatcher]) -> _Work:
        if self._orders is None:
            self._orders = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._orders,), name="masks", daemon=True).start()
        work = _Work(matchers)
        self._orders.put(work)
        return work

    def _leave(self, work: _Work, index: int, grammar: Grammar | None) -> Late:
        """With its thread, which ends when the mask is made."""
        assert self._orders is not None
        self._orders.put(None)
        self._orders = None
        if grammar is not None:
            self._late[grammar] = Late(work, index, is_own=False)
        return Late(work, index)

    def _others(self, matcher: AnyMatcher) -> Late | None:
        return None if matcher.grammar is None else self._late.get(matcher.grammar)


class Late:
    """A mask on its way."""

    def __init__(self, work: _Work, index: int, *, is_own: bool = True) -> None:
        self._work = work
        self._index = index
        self._is_own = is_own

    def poll(self) -> bool:
        """Whether it is there; raises what went wrong."""
        if not self._work.has(self._index):
            return False
        made = self._work.made[self._index]
        if isinstance(made, Exception) and self._is_own:
            raise made
        return True


class _Work:
    """Masks that one thread makes in turn, until it is left alone with one of them."""

    def __init__(self, matchers: Sequence[AnyMatcher]) -> None:
        self.made: list[Made] = []
        self._matchers = matchers
        self._changed = threading.Condition()
        self._is_left = False
        self._occupied: Grammar | None = None  # once it is left
        self._thread: threading.Thread | None = None  # from when it begins
        self._begun_s = 0.0  # of its time

    def run(self) -> None:
        for matcher in self._matchers:
            with self._changed:
                self._thread = threading.current_thread()
                self._begun_s = time.thread_time()
                if self._is_left:
                    _be_nice(self._thread)
            try:
                made = matcher.mask()
            except Exception as error:
                made = error
            with self._changed:
                self.made.append(made)
                if self._is_left:
                    if self._occupied is not None:
                        self._occupied.release()
                    return
        with self._changed:
            self._changed.notify_all()

    def wait(self, patience_s: float) -> int:
        """How many are made when all are, or when one is not after that time; it is left then."""
        with self._changed:
            num_made = -1
            while num_made < len(self.made) < len(self._matchers):
                num_made = len(self.made)
                self._changed.wait_for(lambda: len(self.made) == len(self._matchers), patience_s)
            if len(self.made) < len(self._matchers):
                self._leave(self._matchers[len(self.made)].grammar)
            return len(self.made)

    def _leave(self, grammar: Grammar | None) -> None:
        self._is_left = True
        self._occupied = grammar
        if grammar is not None:
            grammar.occupy()
        if self._thread is not None:
            _be_nice(self._thread)  # it lives: it needs the lock to tell that it is done

    def has(self, index: int) -> bool:
        with self._changed:
            if index < len(self.made):
                return True
            if self._thread is not None and self._took(self._thread) > SLOW_S + EXCESS_S:
                if self._occupied is not None:
                    self._occupied.is_spoiled = True
                raise ConstraintTooComplex.by_time()
            return False

    def _took(self, thread: threading.Thread) -> float:
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) - self._begun_s


def _run(orders: queue.SimpleQueue[_Work | None]) -> None:
    while (work := orders.get()) is not None:
        work.run()


def _be_nice(thread: threading.Thread) -> None:
    if sys.platform == "linux" and thread.native_id is not None:  # elsewhere a thread has no niceness of its own
        os.setpriority(os.PRIO_PROCESS, thread.native_id, NICE)
