"""Limit by slots how many grammars are compiled at a time. API keys take turns, so the grammars of one key do not hold up those of other
keys."""

from __future__ import annotations

import weakref
from collections import Counter

NUM_EXTRA = 1  # slots beyond `num_at_once`, for keys that have no slot


class CompileSlots:
    """The slots of one model: `num_at_once`, and NUM_EXTRA more for keys that have no slot."""

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        # The references are weak: a grammar that no request waits for is deleted, and so frees its slot or leaves the queue.
        self._taken: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._waiting: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        # grammars that were refused, since a slot was last taken, because it was another key's turn
        self._passed_over: weakref.WeakSet[object] = weakref.WeakSet()
        self._turns: dict[str, int] = {}  # by API key: number of the turn in which the key last took a slot
        self._num_turns = 0

    def take(self, who: object, key: str = "") -> bool:
        """Return True if the grammar `who` of a key has a slot, or gets one now. Return False and queue `who` if no slot is free for the
        key, or if it is another key's turn; the caller asks again later. The next turn belongs to the queued key with the fewest slots; if
        several keys have the fewest, to the one that took a slot longest ago. If `who` is refused because it is another key's turn, and no
        grammar takes a slot before `who` asks again, the grammars of that key leave the queue, and `who` gets the slot."""
        if who in self._taken:
            return True
        self._waiting[who] = key
        num_taken = Counter(self._taken.values())
        if num_taken.total() >= self._num_at_once + (0 if num_taken[key] else NUM_EXTRA):
            return False
        if (first := min(self._waiting.values(), key=lambda one: (num_taken[one], self._turns.get(one, 0)))) != key:
            if who not in self._passed_over:
                self._passed_over.add(who)
                return False
            self._forget(first)  # no grammar of the key `first` has asked since `who` was refused
        self._passed_over.clear()
        del self._waiting[who]
        self._taken[who] = key
        self._num_turns += 1
        alive = {*self._waiting.values(), *self._taken.values()}
        self._turns = {one: turn for one, turn in self._turns.items() if one in alive} | {key: self._num_turns}
        return True

    def give_back(self, who: object) -> None:
        """Free the slot of a grammar, if it has one."""
        self._taken.pop(who, None)

    def _forget(self, key: str) -> None:
        """Remove the grammars of a key from the queue."""
        for who in [who for who, other in self._waiting.items() if other == key]:
            del self._waiting[who]
