"""A queue with strict priorities, and deficit round robin on tokens between the fairness keys of a priority."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

QUANTUM = 64  # tokens that a key may spend before the next key's turn; a chunk of a prompt may overdraw it
DEEPEST_DEBT = 4096  # largest debt of a key in tokens, which limits how long a key that used many tokens has to wait


class Waiting(Protocol):
    @property
    def rank(self) -> tuple[int, int, int]:
        """(priority, arrival, choice): the order in which the items of one key are served. Lower is earlier."""
        ...

    @property
    def fairness_key(self) -> str: ...


T = TypeVar("T", bound=Waiting)


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, list[T]]] = {}
        self._deficits: dict[str, int] = {}
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def push(self, item: T) -> None:
        ring = self._levels.setdefault(item.rank[0], OrderedDict())
        insort(ring.setdefault(item.fairness_key, []), item, key=lambda queued: queued.rank)
        self._items[item] = None

    def remove(self, item: T) -> None:
        level, key = item.rank[0], item.fairness_key
        ring = self._levels[level]
        ring[key].remove(item)
        del self._items[item]
        if not ring[key]:
            del ring[key]
        if not ring:
            del self._levels[level]
        if not self._levels:
            self._deficits.clear()  # the queue is empty, so all keys start again without debt

    def head(self) -> T | None:
        if not self._levels:
            return None
        ring = self._levels[min(self._levels)]
        while True:
            key = next(iter(ring))
            deficit = self._deficits.get(key, 0)
            if deficit > 0 or len(ring) == 1:
                return ring[key][0]
            self._deficits[key] = deficit + QUANTUM
            ring.move_to_end(key)

    def charge(self, key: str, num_tokens: int) -> None:
        """Charge a key for tokens that were computed, even if none of its items is queued."""
        if self._levels:
            self._deficits[key] = max(self._deficits.get(key, 0) - num_tokens, -DEEPEST_DEBT)
