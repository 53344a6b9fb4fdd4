"""Remember which replicas have computed which beginnings of prompts, as far as this process has sent them there."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

MOST_KEYS = 500_000


@dataclass(slots=True, eq=False)
class Owners:
    most_keys: int = MOST_KEYS
    clock: Callable[[], float] = time.monotonic
    # for each key the replicas that computed its prompt, with the time of the last use; the key used last comes last
    _used: OrderedDict[bytes, dict[str, float]] = field(default_factory=OrderedDict[bytes, dict[str, float]])

    def learn(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a replica computes a prompt with these keys."""
        now_s = self.clock()
        for key in keys:
            self._used.setdefault(key, {})[replica] = now_s
            self._used.move_to_end(key)
        while len(self._used) > self.most_keys:
            self._used.popitem(last=False)

    def num_kept(self, keys: Sequence[bytes], since_s: Mapping[str, float]) -> dict[str, int]:
        """Return for each replica the number of keys up to the last one whose pages it still has. `since_s`: for each replica a time; pages
        that it last used before this time are taken to be evicted."""
        found: dict[str, int] = {}
        for at in range(len(keys) - 1, -1, -1):
            for replica, used_s in self._used.get(keys[at], {}).items():
                if replica not in found and used_s >= since_s.get(replica, float("inf")):
                    found[replica] = at + 1
            if len(found) == len(since_s):
                break
        return {replica: found.get(replica, 0) for replica in since_s}

    def forget(self, present: Collection[str]) -> None:
        """Forget replicas that are gone."""
        for key in list(self._used):
            kept = {replica: used_s for replica, used_s in self._used[key].items() if replica in present}
            if kept:
                self._used[key] = kept
            else:
                del self._used[key]
