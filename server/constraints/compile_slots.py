"""Slots that limit how many grammars are compiled at a time."""

from __future__ import annotations

import weakref


class CompileSlots:
    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._taken: weakref.WeakSet[object] = weakref.WeakSet()  # weak: a grammar that no request waits for frees its slot

    def take(self, who: object) -> bool:
        if who not in self._taken and len(self._taken) >= self._num_at_once:
            return False
        self._taken.add(who)
        return True

    def give_back(self, who: object) -> None:
        self._taken.discard(who)
