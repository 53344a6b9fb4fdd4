"""The replicas of a pool as this process knows them, and the choice among them.

Ray's router writes here what replicas report, and the ingress chooses here, without a call through Ray for each request. Ray unpickles a
copy of the router's module, but imports this one, so the router and the ingress see the same directory.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deploy.ray.open_requests import OpenRequests
from deploy.ray.owners import Owners
from deploy.ray.ranking import ranked
from deploy.ray.wish import Lease, Wish, place_of

LEAST_BLOCKS = 4  # a replica is named as the giver of pages if it has at least so many blocks of the prompt more than the chosen replica
MOST_MOVED = 10_000  # most responses that are remembered as moved: stored by another replica than the one that their ids name
AVOID_S = 5.0  # seconds for which requests avoid a replica that another request has lost: Ray may not know yet that it is gone


class Directory:
    """The replicas of one pool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = OpenRequests(clock)
        self._clock = clock
        self._owners = Owners(clock=clock)
        self._reports: Mapping[str, Mapping[str, Any]] = {}  # what replicas report, by name
        self._stats: Mapping[str, Mapping[str, Any]] = {}  # the same reports, with the two fields that `_read` adds
        self._lost_s: dict[str, float] = {}  # when a request last lost a replica, by name
        self._is_told = False
        self._moved: OrderedDict[str, str] = OrderedDict()  # the replica that stores a response, by the id of the response
        self._lock = threading.Lock()  # Ray's router may run in a thread of its own

    def hear(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the reports of all replicas by `stats`. Forget replicas that `stats` does not name."""
        with self._lock:
            now_s = self._clock()
            read = {
                name: self._stats[name] if self._reports.get(name) == found else self._read(name, found, now_s)
                for name, found in stats.items()
            }
            if self._stats.keys() - stats.keys():
                self._owners.forget(stats.keys())
            self.requests.forget(stats.keys())
            self._reports, self._stats, self._is_told = stats, read, True
            self._lost_s = {name: then_s for name, then_s in self._lost_s.items() if name in stats}

    def _read(self, name: str, found: Mapping[str, Any], now_s: float) -> Mapping[str, Any]:
        """Return a report with `num_others`, the replica's requests from other processes, and with `kept_since_s`, the time by this
        process's clock since which the replica has evicted nothing that it used."""
        num_others = max(0, int(found.get("num_requests", 0)) - self.requests.most_lately(name))
        age_s = found.get("kept_s")
        return {**found, "num_others": num_others} | ({} if age_s is None else {"kept_since_s": now_s - age_s})

    @property
    def is_told(self) -> bool:
        """Whether Ray has named the replicas of the pool, even if there are none. From then on, Ray names each new one."""
        return self._is_told

    @property
    def is_empty(self) -> bool:
        """Whether no replica is known."""
        return not self._stats

    def has(self, place: bytes) -> bool:
        """Return whether the replica of this place is known. A place is the digest of a replica's name, and the ids that the replica makes
        begin with it."""
        return any(place_of(name) == place for name in self._stats)

    def move(self, response: str, replica: str) -> None:
        """Remember that a replica stores a response whose id names another replica, because it has continued the response's stream."""
        with self._lock:
            self._moved[response] = replica
            while len(self._moved) > MOST_MOVED:
                self._moved.popitem(last=False)

    def place_of_moved(self, response: str) -> bytes | None:
        """Return the place of the replica that stores a response, or None if the response is not known to have moved."""
        replica = self._moved.get(response)
        return None if replica is None else place_of(replica)

    def rank(self, wish: Wish, more: Mapping[str, int]) -> Sequence[str]:
        """Return the replicas that `more` names, the best one first. `more` counts requests that are not open yet."""
        with self._lock:
            here = {name: self.requests[name] + count for name, count in more.items()}
            return ranked(wish, here, {name: self._stats.get(name, {}) for name in here}, self._owners)

    def learn(self, wish: Wish, replica: str) -> None:
        """Remember that a replica gets a request with this wish."""
        with self._lock:
            self._owners.learn(wish.keys, replica)

    def num_kept(self, wish: Wish, replica: str) -> int:
        """Return how many blocks of the prompt a replica has in its prefix cache."""
        return self._kept(wish, [replica])[replica]

    def choose(self, wish: Wish, *, shares: bool = False, learns: bool = True) -> Lease | None:
        """Return a lease of the best replica, or None if each replica has failed this request, or none has reported the address of its
        server. Remember which replicas the request has lost, so that other requests avoid them. If replicas share pages, the lease names
        the replica with most of the prompt if that replica has at least LEAST_BLOCKS more blocks of the prompt than the best one. Unless
        `learns`, the caller decides whether the replica gets the request, and then calls `learn`."""
        stats, now_s = self._stats, self._clock()
        self._lost_s |= dict.fromkeys(wish.lost & stats.keys(), now_s)
        # A request avoids a replica that another one has lost, unless only this replica stores the response that the request names.
        lost = {name for name, then_s in self._lost_s.items() if now_s - then_s < AVOID_S and place_of(name) != wish.place}
        order = self.rank(replace(wish, avoided=wish.avoided | lost), {name: 0 for name in stats if "url" in stats[name]})
        if not order or order[0] in wish.avoided:
            return None
        best = order[0]
        lease = Lease(best, str(stats[best]["url"]), str(stats[best]["key"]))
        if shares:
            kept = self._kept(wish, [name for name in order if name not in wish.avoided | lost or name == best])
            owner = max(kept, key=kept.__getitem__)
            giver = str(stats[owner]["url"]) if kept[owner] - kept[best] >= LEAST_BLOCKS else ""
            lease = replace(lease, giver=giver, num_new=wish.num_blocks - kept[owner])
        if learns:
            self.learn(wish, best)
        return lease

    def _kept(self, wish: Wish, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many blocks of the prompt each of these replicas has in its prefix cache."""
        with self._lock:
            since_s = {name: float(self._stats.get(name, {}).get("kept_since_s", 0.0)) for name in names}
            return self._owners.num_kept(wish.keys[: wish.num_blocks], since_s)


_directories: defaultdict[str, Directory] = defaultdict(Directory)


def directory_of(pool: str) -> Directory:
    return _directories[pool]
