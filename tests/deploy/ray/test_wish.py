"""The ingress reads the prefix, the session and the model of a request, and whether it may be sent twice."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.ray.body import Body
from deploy.ray.wish import BLOCK, MOST_KEYS, chain, place_of, read

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> Body:
    return Body(fields=fields)


def keys_of(tenant: str = "", **fields: Any) -> tuple[bytes, ...]:
    return chain(fields, tenant)


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(texts)]


def test_a_conversation_that_goes_on_keeps_its_first_keys() -> None:
    first, later = conversation("a" * 900), conversation("a" * 900, "b" * 600, "c" * 300)
    before, after = keys_of(messages=first), keys_of(messages=later)
    assert len(after) > len(before) >= 3
    assert after[: len(before)] == before


def test_the_first_difference_changes_all_later_keys() -> None:
    a, b = keys_of(prompt="x" * 2000), keys_of(prompt="x" * 1000 + "y" * 1000)
    same = [one == other for one, other in zip(a, b, strict=True)]
    assert same.index(False) == same.count(True) == 1000 // BLOCK + 1  # the fields before the prompt fill up the fourth block


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"system": "other"},
        {"tools": [{"name": "other"}]},
        {"cache_salt": "other"},
        {"sampling_params": {"cache_salt": "other"}},
    ],
)
def test_what_comes_before_the_turns_is_part_of_all_keys(change: dict[str, Any]) -> None:
    plain = {"model": "demo", "messages": conversation("a" * 900)}
    assert keys_of(**plain)[0] != keys_of(**(plain | change))[0]


def test_a_salt_counts_as_the_server_reads_it() -> None:
    """The salt beside the sampling parameters wins over the one among them."""
    alone, among = keys_of(prompt="x" * 900, cache_salt="a"), keys_of(prompt="x" * 900, sampling_params={"cache_salt": "a"})
    assert alone == among == keys_of(prompt="x" * 900, cache_salt="a", sampling_params={"cache_salt": "b"})
    assert keys_of(prompt="x" * 900, sampling_params={"n": 1}) == keys_of(prompt="x" * 900, sampling_params=5) == keys_of(prompt="x" * 900)


def test_tenants_share_no_keys() -> None:
    assert not {*keys_of("one", prompt="x" * 2000)} & {*keys_of("two", prompt="x" * 2000)}


def test_a_long_token_of_a_tenant_is_no_part_of_the_prompt() -> None:
    """Two prompts of a tenant have no common keys unless they have a common beginning, however long the tenant's token is."""
    token = "Bearer " + "e" * 3 * BLOCK
    one, other = (keys_of(token, prompt=letter * 2 * BLOCK) for letter in "xy")
    assert len(one) == len(keys_of(prompt="x" * 2 * BLOCK)) == 2
    assert not {*one} & {*other}
    salted = keys_of(prompt="x" * 2 * BLOCK, cache_salt="s" * 3 * BLOCK)
    assert len(salted) == 2


def test_a_chain_is_bounded() -> None:
    assert len(keys_of(prompt="x" * BLOCK * (MOST_KEYS + 50))) == MOST_KEYS


def test_a_session_adds_a_key_of_its_own() -> None:
    plain = read("POST", CHAT, {}, body(prompt="x" * 300)).wish.keys
    for headers, fields in (({"x-session-id": "s"}, {}), ({}, {"prompt_cache_key": "s"}), ({}, {"user": "s"})):
        found = read("POST", CHAT, headers, body(prompt="x" * 300, **fields)).wish.keys
        assert found[:-1] == plain
        assert found[-1] == read("POST", CHAT, {"x-session-id": "s"}, body()).wish.keys[-1]


@pytest.mark.parametrize("wrong", [{}, {"messages": 5, "tools": 7, "model": []}])
def test_a_body_without_meaning_is_still_passed_on(wrong: dict[str, Any]) -> None:
    found = read("POST", CHAT, {}, body(**wrong))
    assert found.wish.keys == ()
    assert found.model == ""
    assert found.repeatable


@pytest.mark.parametrize(
    ("method", "path", "fields", "repeatable"),
    [
        ("POST", "/v1/messages", {}, True),
        ("POST", "/api/chat", {}, True),
        ("POST", "/v1/responses", {}, True),
        ("POST", "/v1/responses", {"tools": [{"type": "mcp"}]}, False),
        ("POST", "/v1/responses", {"background": True}, False),
        ("POST", "/v1/responses/resp_1/cancel", {}, False),
        ("DELETE", "/v1/responses/resp_1", {}, False),
        ("POST", "/unknown", {}, False),
        ("GET", "/v1/models", {}, True),
    ],
)
def test_only_requests_that_compute_may_be_sent_twice(method: str, path: str, fields: dict[str, Any], repeatable: bool) -> None:
    assert read(method, path, {}, body(**fields)).repeatable is repeatable


def test_a_stored_response_is_sought_where_it_was_made() -> None:
    place = place_of("replica#x")
    stored = f"resp_{place.hex()}00112233"
    assert read("GET", f"/v1/responses/{stored}", {}, Body()).wish.place == place
    assert read("DELETE", f"/v1/responses/{stored}", {}, Body()).wish.place == place
    assert read("POST", f"/v1/responses/{stored}/cancel", {}, Body()).stored == stored
    for path in ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"):
        found = read("POST", path, {}, body(previous_response_id=stored))
        assert (found.wish.place, found.stored) == (place, stored)
    assert read("POST", "/v1/responses", {}, body(previous_response_id="x")).wish.place == b""
    assert read("POST", CHAT, {}, body(previous_response_id=stored)).wish.place == b""


def test_what_is_not_decoded_may_have_side_effects() -> None:
    unknown = Body(b"x", is_decoded=False)
    assert not read("POST", "/v1/responses", {}, unknown).repeatable
    found = read("POST", CHAT, {"x-session-id": "s"}, unknown)
    assert found.repeatable
    assert len(found.wish.keys) == 1


@pytest.mark.parametrize(
    ("method", "path", "query", "fields", "named"),
    [
        ("POST", CHAT, "", {"model": "a"}, "a"),
        ("POST", "/api/show", "", {"name": "a"}, "a"),
        ("POST", CHAT, "", {"name": "a"}, ""),
        ("GET", "/v1/models/org/a", "", {}, "org/a"),
        ("GET", "/v2/models/a/ready", "", {}, "a/ready"),
        ("GET", "/web/a/chat.html", "", {}, "a/chat.html"),
        ("GET", "/props", "x=1&model=a%20b", {}, "a b"),
        ("GET", "/health", "", {}, ""),
    ],
)
def test_the_model_is_named_in_the_body_the_path_or_the_query(
    method: str, path: str, query: str, fields: dict[str, Any], named: str
) -> None:
    assert read(method, path, {}, body(**fields), query).model == named
