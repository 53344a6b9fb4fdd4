"""A queue with strict priorities, and deficit round robin on tokens between the fairness keys of a priority.

An item of a key is fresh, or it has had its turn (`Waiting.had_turn`). The caller of `head` decides for each key which of the two kinds
goes first.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from server.messages import IDLE

QUANTUM = 64  # tokens that a key may spend before the next key's turn; a chunk of a prompt may exceed this number
DEEPEST_DEBT = 4096  # largest debt of a key in tokens, which limits how long a key that used many tokens has to wait


class Waiting(Protocol):
    """An item of a queue."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """(priority, arrival, choice): the order in which the items of one key are served. Lower is earlier."""
        ...

    @property
    def fairness_key(self) -> str: ...

    @property
    def had_turn(self) -> bool:
        """False for a fresh item. Only the value at the time of `push` counts."""
        ...


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True)
class Line(Generic[T]):
    """The items of one key and priority: those that are fresh, and those that have had their turn, each in order of rank."""

    fresh: list[T] = field(default_factory=lambda: list[T]())
    others: list[T] = field(default_factory=lambda: list[T]())


class FairQueue(Generic[T]):
    """The waiting items of all keys. The caller takes the head with `head` and `remove`, and charges its key with `charge`."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, Line[T]]] = {}  # by priority: the lines of its keys, in the order of their turns
        self._deficits: dict[str, int] = {}  # tokens that a key may still spend in its turn; below 0: a debt
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    @property
    def first_priority(self) -> int | None:
        """The priority of the next item; None: the queue is empty."""
        return min(self._levels, default=None)

    def push(self, item: T) -> None:
        """Queue an item in the line of its priority and key."""
        ring = self._levels.setdefault(item.rank[0], OrderedDict())
        line = ring.setdefault(item.fairness_key, Line())
        insort(line.others if item.had_turn else line.fresh, item, key=lambda queued: queued.rank)
        self._items[item] = None

    def remove(self, item: T) -> None:
        """Remove a queued item. Once the queue is empty, forget what the keys have spent."""
        level, key = item.rank[0], item.fairness_key
        ring = self._levels[level]
        line = ring[key]
        (line.fresh if item in line.fresh else line.others).remove(item)
        del self._items[item]
        if not line.fresh and not line.others:
            del ring[key]
        if not ring:
            del self._levels[level]
        if not self._levels:
            self._deficits.clear()  # the queue is empty, so all keys start again without debt

    def head(self, fresh_first: Callable[[str], bool] = lambda _key: True) -> T | None:
        """Return the next item, which stays queued, or None if the queue is empty. A key that has spent its tokens gets QUANTUM more, and
        its next turn comes after those of all other keys of the priority. `fresh_first` tells whether the fresh items of a key go before
        its other items."""
        if not self._levels:
            return None
        ring = self._levels[min(self._levels)]
        while True:
            key = next(iter(ring))
            deficit = self._deficits.get(key, 0)
            if deficit > 0 or len(ring) == 1:
                line = ring[key]
                return (line.fresh if line.fresh and (not line.others or fresh_first(key)) else line.others)[0]
            self._deficits[key] = deficit + QUANTUM
            ring.move_to_end(key)

    def charge(self, key: str, num_tokens: int) -> None:
        """Charge a key for tokens, even if none of its items is queued. Nothing is charged while the queue is empty, because no key
        waits."""
        if self._levels:
            self._deficits[key] = max(self._deficits.get(key, 0) - num_tokens, -DEEPEST_DEBT)


def is_live(priority: int | None) -> bool:
    """Return whether `priority`, the best priority of a queue, is that of a request outside batch jobs. None stands for an empty queue, for
    which the result is False."""
    return priority is not None and priority < IDLE
