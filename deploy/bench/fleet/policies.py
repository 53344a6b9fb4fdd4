"""Policies: which replica of a cell gets a request. All but `round-robin` use the router's own ranking (`deploy/ray/ranking.py`), with all
or some of the facts about the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.bench.fleet.replica import Replica
from deploy.bench.fleet.traces import Arrival, extended, key_of
from deploy.ray.owners import Owners
from deploy.ray.ranking import ranked
from deploy.ray.wish import Wish

WishOf = Callable[[Arrival], Wish]  # what the router knows about a request


def _session(arrival: Arrival) -> bytes:
    """Return the key that stands for the session of a request."""
    return key_of(b"", f"session {arrival.session}")


def _of_session(arrival: Arrival) -> Wish:
    """Return the wish of a request if the router knows only the session and the length of its prompt."""
    return Wish(extended((_session(arrival),), "any", arrival.num_prompt))


# For each policy that uses the ranking: what the router knows about a request. "load": nothing; "sessions": its session and the length of
# its prompt; "prefix": its session and the beginnings of its prompt.
WISHES: Mapping[str, WishOf] = {
    "load": lambda _: Wish(),
    "sessions": _of_session,
    "prefix": lambda arrival: Wish((*arrival.keys, _session(arrival))),
}
POLICIES = ("round-robin", *WISHES)


class Cell:
    """Replicas behind one router. A request enters one cell and stays there, so that a router needs to know only its own replicas."""

    def __init__(self, name: str, replicas: Sequence[Replica], policy: str, prefill: Sequence[Replica] = ()) -> None:
        """`policy`: one of POLICIES. `prefill`: replicas that compute long prompts for the others; `choose` never returns one of
        these."""
        self.name = name
        self.replicas = replicas
        self.prefill = prefill
        self.now_s = 0.0
        self._wish_of = WISHES.get(policy)
        self._owners = Owners(clock=lambda: self.now_s)
        self._num_routed = 0

    @property
    def is_up(self) -> bool:
        """Whether a replica of the cell is up."""
        return any(replica.is_up for replica in self.replicas)

    def advance(self, until_s: float) -> None:
        """Let the clocks of the cell and of all its replicas run up to a time."""
        self.now_s = until_s
        for replica in (*self.replicas, *self.prefill):
            replica.advance(until_s)

    def least_load(self) -> int:
        """Return the load of the least loaded replica that is up. At least one must be up."""
        return min(replica.load for replica in self.replicas if replica.is_up)

    def choose(self, arrival: Arrival) -> Replica:
        """Choose a replica for a request, and remember that this replica gets the prefixes of the prompt. At least one replica must be
        up."""
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
        """Let the router forget which prefixes were in the caches of the replicas that are down now."""
        self._owners.forget({replica.name for replica in self.replicas if replica.is_up})
