"""The ingress ranks the replicas for each request, by their prefix caches, their load and the responses that they store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from deploy.ray.owners import Owners
from deploy.ray.ranking import REQUEST_BLOCKS, SLACK, ranked
from deploy.ray.wish import Wish, place_of

KEYS = tuple(bytes([at]) * 8 for at in range(4))
NO_STATS: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}


def idle(**loads: int) -> dict[str, int]:
    return {"a": 0, "b": 0, "c": 0} | loads


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_longest_prefix_wins() -> None:
    owners = Owners()
    owners.learn(KEYS[:2], "a")
    owners.learn(KEYS[:3], "b")
    assert ranked(Wish(KEYS), idle(), NO_STATS, owners)[:2] == ["b", "a"]
    assert ranked(Wish(KEYS[:2]), idle(b=1), NO_STATS, owners)[0] == "a"  # both have it, so the load decides


def test_a_busy_owner_gives_way() -> None:
    """Each request that it has more than others must be worth it: the prefix that it saves is longer than what the request delays."""
    owners, long = Owners(), tuple(at.to_bytes(8) for at in range(REQUEST_BLOCKS * 10))
    owners.learn(long, "a")
    for num_more in range(1, SLACK + 1):
        prefix = long[: REQUEST_BLOCKS * num_more]
        assert ranked(Wish((*prefix, long[len(prefix)])), idle(a=num_more), NO_STATS, owners)[0] == "a"
        assert ranked(Wish(prefix[:-1]), idle(a=num_more), NO_STATS, owners)[0] != "a"
    assert ranked(Wish(long), idle(a=SLACK + 1), NO_STATS, owners)[-1] == "a", "others wait too long, whatever the prefix saves"


def test_requests_of_other_processes_count_too() -> None:
    stats = NO_STATS | {"a": {"num_others": 9}, "b": {"num_others": 2}}
    assert ranked(Wish(), idle(c=5), stats, Owners()) == ["b", "c", "a"]


def test_evicted_prefixes_do_not_count() -> None:
    clock = Clock()
    owners = Owners(clock=clock)
    owners.learn(KEYS, "a")
    clock.now_s = 200.0
    owners.learn(KEYS[:1], "b")
    stats = NO_STATS | {"a": {"kept_since_s": 150.0}, "b": {"kept_since_s": 150.0}}
    assert ranked(Wish(KEYS), idle(), stats, owners)[0] == "b"


def test_ingresses_agree_on_unknown_prefixes_and_spread_them() -> None:
    firsts = {ranked(Wish((bytes([at]) * 8,)), idle(), NO_STATS, Owners())[0] for at in range(30)}
    assert firsts == {"a", "b", "c"}
    assert ranked(Wish(KEYS), idle(), NO_STATS, Owners()) == ranked(Wish(KEYS), idle(), NO_STATS, Owners())


def test_a_stored_response_binds_and_a_failed_replica_comes_last() -> None:
    owners = Owners()
    owners.learn(KEYS, "a")
    assert ranked(Wish(KEYS, place_of("c")), idle(c=50), NO_STATS, owners)[0] == "c"
    assert ranked(Wish(KEYS, avoided=frozenset("a")), idle(b=30, c=20), NO_STATS, owners) == ["c", "b", "a"]


def test_old_keys_and_lost_replicas_are_forgotten() -> None:
    owners = Owners(most_keys=3)
    owners.learn(KEYS, "a")
    assert owners.num_kept(KEYS[:1], {"a": 0.0}) == {"a": 0}
    assert owners.num_kept(KEYS, {"a": 0.0}) == {"a": 4}
    owners.learn(KEYS[1:2], "b")
    owners.forget({"b"})
    assert owners.num_kept(KEYS, {"a": 0.0, "b": 0.0}) == {"a": 0, "b": 2}


def test_a_replica_that_ends_costs_no_look_at_all_keys() -> None:
    """There may be half a million keys, and the streams of all other replicas wait meanwhile."""

    class Counted(OrderedDict[bytes, Any]):
        num_seen = 0

        def __iter__(self) -> Iterator[bytes]:
            for key in super().__iter__():
                self.num_seen += 1
                yield key

    owners = Owners()
    owners._used = Counted()
    owners.learn([at.to_bytes(8) for at in range(1000)], "a")
    owners.forget({"b"})
    assert owners._used.num_seen < 10
    assert owners.num_kept([(0).to_bytes(8)], {"a": 0.0}) == {"a": 0}


def test_replicas_that_have_ended_take_no_memory() -> None:
    """A beginning that all prompts share is used for as long as the ingress lives."""
    owners = Owners()
    for number in range(100):
        owners.learn(KEYS[:1], f"replica {number}")
        owners.forget({f"replica {number}"})
    assert len(owners._used[KEYS[0]]) < 5
    assert owners.num_kept(KEYS[:1], {"replica 99": 0.0, "replica 98": 0.0}) == {"replica 99": 1, "replica 98": 0}


def test_a_replica_that_comes_back_has_only_what_it_computes_then() -> None:
    owners = Owners()
    owners.learn(KEYS, "a")
    owners.forget({"b"})
    owners.learn(KEYS[:2], "a")
    assert owners.num_kept(KEYS, {"a": 0.0}) == {"a": 2}
