"""Let the streams of several cards wait for each other, by events. With one card there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.device.cuda.card import Card


class Lockstep:
    """Makes streams of cards wait for each other. A stream waits for the work that was launched on other streams before the call. If the
    streams are being captured, the waits become part of the graph."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = cards
        self._events = [card.event(self) for card in cards] if len(cards) > 1 else []

    def meet(self) -> None:
        """Let each card wait for all others."""
        self._let(range(len(self._events)), range(len(self._events)))

    def join(self) -> None:
        """Let the first card wait for all others."""
        self._let([0], range(1, len(self._events)))

    def fork(self) -> None:
        """Let all other cards wait for the first."""
        self._let(range(1, len(self._events)), [0])

    def _let(self, waiting: Sequence[int], awaited: Sequence[int]) -> None:
        """Let the ranks `waiting` wait for the work that was launched on the ranks `awaited`."""
        if not self._events:
            return
        for rank in awaited:
            self._cards[rank].record(self._events[rank])
        for rank in waiting:
            for other in awaited:
                if other != rank:
                    self._cards[rank].follow(self._events[other])
