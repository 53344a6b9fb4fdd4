"""Measure the time that a GPU spends in regions, by CUDA events."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from runtime.device.cuda.card import Card, Owned


class Clock:
    """Adds up the times of a card's runs of regions."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._running: deque[tuple[Owned, Owned]] = deque()  # pairs of events around each run whose time is not counted yet
        self._idle: list[tuple[Owned, Owned]] = []  # pairs of events that can be used again
        self._done_s = 0.0
        self.num_runs = 0

    @property
    def busy_s(self) -> float:
        """Total seconds of the runs that have ended."""
        self._collect()
        return self._done_s

    @contextmanager
    def running(self) -> Generator[None]:
        """Count the card's time for the work that is launched inside the `with`."""
        if not self._idle:
            self._collect()
        begin, end = self._idle.pop() if self._idle else (self._card.event(self), self._card.event(self))
        self._card.record(begin)
        yield
        self._card.record(end)
        self.num_runs += 1
        self._running.append((begin, end))

    def _collect(self) -> None:
        while self._running and (passed_s := self._card.elapsed_s(*self._running[0])) is not None:
            self._done_s += passed_s
            self._idle.append(self._running.popleft())
