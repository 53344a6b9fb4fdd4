"""The choice among replicas that the ingress makes without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deploy.ray.directory import AVOID_S, LEAST_BLOCKS, Directory, directory_of
from deploy.ray.prefill import Prefill
from deploy.ray.wish import BLOCK, Lease, Wish, place_of

KEYS = tuple(bytes([at]) * 8 for at in range(6))


def reported(name: str, num_requests: int = 0) -> dict[str, Any]:
    return {"url": f"http://{name}:1", "key": f"key of {name}", "num_requests": num_requests, "kept_s": None}


def test_nobody_is_chosen_before_a_replica_has_reported() -> None:
    directory = Directory()
    assert directory.choose(Wish()) is None
    directory.hear({"a": {}})
    assert directory.choose(Wish()) is None, "a replica that has just started has not said where its server is"


def test_the_owner_of_a_prefix_is_chosen_again() -> None:
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b")})
    first = directory.choose(Wish(KEYS))
    assert first is not None
    assert first == Lease(first.replica, f"http://{first.replica}:1", f"key of {first.replica}")
    directory.requests.begin(first.replica)
    assert directory.choose(Wish(KEYS)) == first
    other = directory.choose(Wish())
    assert other is not None
    assert other.replica != first.replica, "a request without a prefix goes to the one with less to do"


def test_the_age_of_what_a_replica_has_kept_is_counted_from_its_report() -> None:
    """Ray repeats a report when another replica has a new one. The clock of the replica does not matter."""
    now_s = 1000.0
    directory = Directory(lambda: now_s)
    report = reported("a")
    directory.hear({"a": report})
    directory.learn(Wish(KEYS, num_blocks=len(KEYS)), "a")
    now_s = 1010.0
    report = {**report, "kept_s": 11.0}  # what was used before 999 is evicted
    directory.hear({"a": report})
    assert directory.num_kept(Wish(KEYS, num_blocks=len(KEYS)), "a") == len(KEYS)
    now_s = 1020.0
    directory.hear({"a": report, "b": reported("b")})
    assert directory.num_kept(Wish(KEYS, num_blocks=len(KEYS)), "a") == len(KEYS)
    directory.hear({"a": {**report, "kept_s": 19.0}, "b": reported("b")})  # what was used before 1001 is evicted
    assert directory.num_kept(Wish(KEYS, num_blocks=len(KEYS)), "a") == 0


def test_a_replica_without_an_address_waits() -> None:
    directory = Directory()
    directory.hear({"a": reported("a", 9), "b": {}})
    found = directory.choose(Wish())
    assert found is not None
    assert found.replica == "a"


def test_ray_is_asked_when_all_have_failed_a_request() -> None:
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b")})
    found = directory.choose(Wish(avoided=frozenset("a")))
    assert found is not None
    assert found.replica == "b"
    assert directory.choose(Wish(avoided=frozenset("ab"))) is None
    assert {*directory.rank(Wish(avoided=frozenset("ab")), {"a": 0, "b": 0, "new": 0})} == {"a", "b", "new"}
    assert directory.rank(Wish(avoided=frozenset("ab")), {"a": 0, "b": 0, "new": 0})[0] == "new"


def test_a_replica_that_a_request_has_lost_is_avoided_by_others_for_a_while() -> None:
    now_s = [100.0]
    directory = Directory(lambda: now_s[0])
    directory.hear({"a": reported("a"), "b": reported("b", 9)})

    def chosen(*lost: str) -> str | None:
        found = directory.choose(Wish(avoided=frozenset(lost), lost=frozenset(lost)))
        return None if found is None else found.replica

    assert [chosen(), chosen("a"), chosen()] == ["a", "b", "b"]
    now_s[0] += AVOID_S
    assert chosen() == "a"
    assert chosen("a", "b") is None
    assert chosen() == "a", "all have failed some request, so the best one is tried"
    directory.hear({"b": reported("b")})
    directory.hear({"a": reported("a"), "b": reported("b", 9)})
    assert chosen() == "a", "it has started again"


def test_a_replica_that_was_busy_for_a_request_is_not_avoided_by_others() -> None:
    """It answers, so it is there, and its queue gets shorter with each step."""
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b", 9)})
    first, second = (directory.choose(Wish(avoided=frozenset(avoided))) for avoided in ("a", ""))
    assert first is not None and second is not None
    assert (first.replica, second.replica) == ("b", "a")


def test_a_replica_that_another_request_has_lost_is_asked_for_what_only_it_stores() -> None:
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b", 9)})
    assert directory.choose(Wish(avoided=frozenset("a"), lost=frozenset("a"))) is not None

    def chosen(wish: Wish) -> str | None:
        found = directory.choose(wish)
        return None if found is None else found.replica

    assert chosen(Wish()) == "b"
    assert chosen(Wish(place=place_of("a"))) == "a", "b would say that there is no such response"
    assert chosen(Wish(place=place_of("a"), avoided=frozenset("a"))) == "b", "it has failed this request itself"


def test_a_pool_without_replicas_is_not_one_that_ray_has_not_named() -> None:
    directory = Directory()
    assert (directory.is_told, directory.is_empty) == (False, True)
    directory.hear({})
    assert (directory.is_told, directory.is_empty) == (True, True)
    directory.hear({"a": reported("a")})
    assert (directory.is_told, directory.is_empty) == (True, False)


def test_the_replica_of_a_moved_response_is_remembered_for_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.ray.directory.MOST_MOVED", 2)
    directory = Directory()
    for number in range(3):
        directory.move(f"resp_{number}", "b")
    assert [directory.place_of_moved(f"resp_{number}") for number in range(4)] == [None, place_of("b"), place_of("b"), None]


def test_what_lost_replicas_had_is_forgotten() -> None:
    directory = Directory()
    directory.hear({"a": reported("a")})
    assert directory.choose(Wish(KEYS)) is not None
    directory.requests.begin("a")
    directory.requests.begin("gone")
    directory.requests.end("gone")
    directory.hear({"b": reported("b")})
    assert directory.requests["a"] == 1, "a request of a lost replica still counts until it ends"
    assert directory.requests.replicas == {"a", "b"}
    directory.hear({"c": reported("c")})
    assert directory.requests.replicas == {"a", "c"}, "no request was ever sent to b"
    directory.hear({"a": reported("a"), "b": reported("b")})
    found = directory.choose(Wish(KEYS))
    assert found is not None
    assert found.replica == "b", "a came back with an empty cache"


def test_leases_on_their_way_count() -> None:
    directory = Directory()
    assert directory.rank(Wish(), {"a": 1, "b": 0})[0] == "b"


def test_pools_have_directories_of_their_own() -> None:
    assert directory_of("large") is directory_of("large")
    assert directory_of("large") is not directory_of("small")


LONG = tuple(bytes([at]) * 8 for at in range(20))


def sharing() -> Directory:
    """Return a directory in which replica a has the long prompt and is busy."""
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b", 1)})
    assert (first := directory.choose(Wish(LONG, num_blocks=16))) is not None and first.replica == "a"
    directory.hear({"a": reported("a", 9), "b": reported("b", 1)})
    return directory


def test_a_busy_owner_is_named_as_giver() -> None:
    found = sharing().choose(Wish(LONG, num_blocks=16), shares=True)
    assert found == Lease("b", "http://b:1", "key of b", giver="http://a:1")
    assert sharing().choose(Wish(LONG, num_blocks=16)) == Lease("b", "http://b:1", "key of b")


def test_a_short_beginning_is_not_worth_a_question() -> None:
    found = sharing().choose(Wish(LONG[: LEAST_BLOCKS - 1], num_blocks=LEAST_BLOCKS - 1), shares=True)
    assert found is not None
    assert (found.giver, found.num_new) == ("", 0)


def test_an_owner_that_has_failed_gives_nothing() -> None:
    found = sharing().choose(Wish(LONG, num_blocks=16, avoided=frozenset("a")), shares=True)
    assert found is not None
    assert (found.replica, found.giver, found.num_new) == ("b", "", 16)


def test_the_session_is_no_part_of_the_prompt() -> None:
    """A replica knows the session, but not the text that the session goes on with."""
    directory = Directory()
    directory.hear({"a": reported("a"), "b": reported("b", 1)})
    directory.choose(Wish((*LONG[:5], b"session."), num_blocks=5))
    found = directory.choose(Wish((*LONG, b"session."), num_blocks=20), shares=True)
    assert found is not None
    assert (found.replica, found.giver, found.num_new) == ("a", "", 15)


def test_long_new_prompts_are_computed_by_a_prefill_replica() -> None:
    others, asked = Directory(), list[Wish]()

    async def lease(wish: Wish) -> None:
        asked.append(wish)

    async def main() -> list[Lease]:
        prefill = Prefill(others, lease, 10 * BLOCK)
        first = Lease("b", "http://b:1", "key", num_new=10)
        found = [prefill.added(first, Wish(LONG, num_blocks=20))]
        await asyncio.sleep(0)
        others.hear({"p": reported("p")})
        return [*found, *(prefill.added(replace(first, num_new=count), Wish(LONG, num_blocks=20)) for count in (9, 10))]

    unknown, short, long = asyncio.run(main())
    assert len(asked) == 1, "Ray is asked, so that it begins to tell of these replicas"
    assert not unknown.giver and not short.giver
    assert long == Lease("b", "http://b:1", "key", giver="http://p:1", computes=True, num_new=10)


def test_a_prefill_replica_does_not_compute_a_long_history_again() -> None:
    """A prefill replica has nothing of a prompt until it has computed one with the same beginning."""
    others = Directory()
    others.hear({"p": reported("p")})
    prefill = Prefill(others, lambda _wish: pytest.fail("Ray is asked, although a replica is known"), 4 * BLOCK)
    owned = Lease("b", "http://b:1", "key", giver="http://a:1", num_new=9)
    assert prefill.added(owned, Wish(LONG, num_blocks=19)) == owned, "19 blocks are more than twice 9, so the owner still gives"
    assert prefill.added(owned, Wish(LONG, num_blocks=19)) == owned, "it has not got the prompt, so nothing was learnt"
    computed = prefill.added(replace(owned, num_new=10), Wish(LONG, num_blocks=20))
    assert (computed.giver, computed.computes) == ("http://p:1", True)
    known = prefill.added(owned, Wish(LONG, num_blocks=19))
    assert (known.giver, known.computes) == ("http://p:1", True), "now it has the beginning"
