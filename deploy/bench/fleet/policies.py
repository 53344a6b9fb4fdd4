"""Policies: which replica of a cell gets a request. All but `round-robin` use the router's own ranking (`deploy/ray/ranking.py`), with all
or some of the facts about the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.bench.fleet.replica import Replica
from deploy.bench.fleet.traces import Arrival, extended, key_of
from deploy.ray.owners import Owners
from deploy.ray.ranking import ranked
from deploy.ray.wish import Wish

WishOf = Callable[[Arrival], Wish]


def _session(arrival: Arrival) -> bytes:
    return key_of(b"", f"session {arrival.session}")


def _of_session(arrival: Arrival) -> Wish:
    """Return the wish of a request if the router knows only the session and the length of its prompt."""
    return Wish(extended((_session(arrival),), "any", arrival.num_prompt))


WISHES: Mapping[str, WishOf] = {
    "load": lambda _: Wish(),
    "sessions": _of_session,
    "prefix": lambda arrival: Wish((*arrival.keys, _session(arrival))),
}
POLICIES = ("round-robin", *WISHES)


class Cell:
    """Replicas behind one router. A request enters and stays in one cell, so that no router knows more than its replicas."""

    def __init__(self, name: str, replicas: Sequence[Replica], policy: str, prefill: Sequence[Replica] = ()) -> None:
        """`prefill`: replicas that compute long prompts for the others."""
        self.name = name
        self.replicas = replicas
        self.prefill = prefill
        self.now_s = 0.0
        self._wish_of = WISHES.get(policy)
        self._owners = Owners(clock=lambda: self.now_s)
        self._num_routed = 0

    @property
    def is_up(self) -> bool:
        return any(replica.is_up for replica in self.replicas)

    def advance(self, until_s: float) -> None:
        self.now_s = until_s
        for replica in (*self.replicas, *self.prefill):
            replica.advance(until_s)

    def least_load(self) -> int:
        return min(replica.load for replica in self.replicas if replica.is_up)

    def choose(self, arrival: Arrival) -> Replica:
        """Choose a replica. At least one must be up."""
        present = {replica.name: replica for replica in self.replicas if replica.is_up}
        self._num_routed += 1
        if self._wish_of is None:
            return list(present.values())[self._num_routed % len(present)]
        wish = self._wish_of(arrival)
        stats = {name: {"kept_since_s": replica.prefixes.kept_since_s} for name, replica in present.items()}
        best = ranked(wish, {name: replica.load for name, replica in present.items()}, stats, self._owners)[0]
        self._owners.learn(wish.keys, best)
        return present[best]

    def forget(self) -> None:
        """Forget which prefixes the replicas that are down had."""
        self._owners.forget({replica.name for replica in self.replicas if replica.is_up})
