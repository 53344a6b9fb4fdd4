"""Remember which replicas have computed which beginnings of prompts. Only prompts that this process has sent to the replicas are known."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

MOST_KEYS = 500_000


@dataclass(slots=True, eq=False)
class Owners:
    """The keys of prompts (`wish.py`), each with the replicas that computed a prompt with this key. At most `most_keys` keys are
    remembered, those that were used last."""

    most_keys: int = MOST_KEYS
    clock: Callable[[], float] = time.monotonic
    # for each key the numbers of the replicas that computed its prompt, with the time of the last use; the key used last comes last
    _used: OrderedDict[bytes, dict[int, float]] = field(default_factory=OrderedDict[bytes, dict[int, float]])
    # The numbers of the present replicas, and their names by number. A replica that is gone loses its number, so it is forgotten without a
    # look at all keys; if the replica comes back, it gets another number.
    _numbers: dict[str, int] = field(default_factory=dict[str, int])
    _names: dict[int, str] = field(default_factory=dict[int, str])
    _count: Iterator[int] = field(default_factory=count)

    def learn(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a replica computes a prompt with these keys."""
        number, now_s = self._number_of(replica), self.clock()
        for key in keys:
            used = self._used.setdefault(key, {})
            used[number] = now_s
            if len(used) > len(self._names):
                for gone in used.keys() - self._names.keys():
                    del used[gone]
            self._used.move_to_end(key)
        while len(self._used) > self.most_keys:
            self._used.popitem(last=False)

    def _number_of(self, replica: str) -> int:
        if (number := self._numbers.get(replica)) is None:
            number = self._numbers[replica] = next(self._count)
            self._names[number] = replica
        return number

    def num_kept(self, keys: Sequence[bytes], since_s: Mapping[str, float]) -> dict[str, int]:
        """Return for each replica the number of keys up to the last one whose pages it still has. `since_s`: for each replica a time; pages
        that the replica last used before this time are taken to be evicted."""
        found: dict[str, int] = {}
        for at in range(len(keys) - 1, -1, -1):
            for number, used_s in self._used.get(keys[at], {}).items():
                replica = self._names.get(number, "")
                if replica not in found and used_s >= since_s.get(replica, float("inf")):
                    found[replica] = at + 1
            if len(found) == len(since_s):
                break
        return {replica: found.get(replica, 0) for replica in since_s}

    def forget(self, present: Collection[str]) -> None:
        """Forget all replicas except those in `present`."""
        for replica in [replica for replica in self._numbers if replica not in present]:
            del self._names[self._numbers.pop(replica)]
