"""Keys of one server are tenants: what one key asks tells other keys nothing, and takes nothing from them."""

from __future__ import annotations

import pytest

from server.api.context import Caller
from server.api.openai.responses.store import ResponseStore, Stored
from server.errors import ApiError
from server.http.keys import KeyRing
from server.messages import SamplingParams, Submit
from server.settings import SettingsError
from server.workers.ledger import Generation

ALICE, BOB, CAROL, DAVE = "alice-0123456789", "bob-0123456789", "carol-0123456789", "dave-0123456789"
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def salts_of(serve, **settings) -> dict[str, str]:
    """Return the salt of a completion with each key, and with a salt of its own (`KEY s`)."""
    server = serve(**settings)
    salts: dict[str, str] = {}
    for key in (ALICE, BOB, CAROL, DAVE):
        client = server.http(headers={"authorization": f"Bearer {key}"})
        for name, fields in ((key, {}), (f"{key} s", {"cache_salt": "s"})):
            assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **fields}).status_code == 200
            salts[name] = server.worker.submits[-1].cache_salt
    return salts


def test_each_key_has_a_salt_and_a_group_shares_one(serve, tmp_path):
    """By default each key has a salt of its own, and keys of one group may share one. A request's own salt is combined with that of its
    tenant."""
    file = tmp_path / "keys"
    file.write_text(f"{CAROL} group=team\n{DAVE}   group=team\n")
    salts = salts_of(serve, api_keys=(ALICE, BOB), api_key_file=file)
    assert salts[CAROL] == salts[DAVE] and salts[f"{CAROL} s"] == salts[f"{DAVE} s"]
    assert len({salts[name] for name in (ALICE, BOB, CAROL, f"{ALICE} s", f"{BOB} s", f"{CAROL} s")}) == 6
    assert not any(key in salt or not salt for key in (ALICE, BOB, CAROL, DAVE) for salt in salts.values()), "a salt never has the key"


def test_without_keys_all_callers_are_one_tenant(serve):
    """A client may send any key to a server without keys. Such a key is not checked, so it divides nothing."""
    salts = salts_of(serve)
    assert set(salts.values()) == {"", "s"}


def test_no_salt_of_a_request_imitates_another_tenant():
    tenants = (Caller("a", tenant="0123456789abcdef"), Caller("b", tenant="group/team"), Caller("c", tenant="group/team2"))
    found = [caller.salt(asked) for caller in tenants for asked in (None, "s", "2:s", "group/team:s", ":")]
    assert len(set(found)) == len(found)


def test_texts_to_embed_are_salted_too(serve, answering):
    server = serve(script=answering("hi", embedding_size=4), api_keys=(ALICE, BOB))
    for key in (ALICE, BOB):
        answer = server.http(headers={"x-api-key": key}).post("/v1/embeddings", json={"input": "hi"})
        assert answer.status_code == 200
    assert len({embed.cache_salt for embed in server.worker.embeds} - {""}) == 2


def test_a_request_keeps_its_salt_in_the_next_worker():
    job = Generation(submit=Submit("a", (1, 2), GREEDY, cache_salt="tenant:s"))
    assert job.message().cache_salt == "tenant:s"


@pytest.mark.parametrize("line", [f"{ALICE} group=", f"{ALICE} group=a/b", f"{ALICE} group=a group=b", f"{ALICE} group=a b"])
def test_a_group_without_a_valid_name_is_refused(line):
    with pytest.raises(SettingsError, match="expected KEY group=NAME") as refused:
        KeyRing((line,), None, "api_keys")
    assert ALICE not in str(refused.value)


def test_a_key_may_move_to_a_group_while_the_server_runs(tmp_path):
    file = tmp_path / "keys"
    file.write_text(ALICE)
    ring = KeyRing((), file, "api_keys")
    alone = ring.find(ALICE)
    assert alone is not None
    file.write_text(f"{ALICE} group=team")
    moved = ring.find(ALICE)
    assert moved is not None and moved.tenant == "group/team" != alone.tenant


def test_no_key_fills_the_queue_for_others(serve, answering):
    """A key with many streams gets 429 by name before the queue is full, and another key is still served."""
    server = serve(script=answering("x" * 1000, interval_s=0.05), api_keys=(ALICE, BOB), max_queued_requests=16)
    greedy, modest = (server.openai(api_key=key) for key in (ALICE, BOB))
    body = {"model": "null", "prompt": "hi", "stream": True, "extra_body": {"n": 10}}
    streams = [greedy.completions.create(**body) for _ in range(7)]
    refused = server.http(headers={"x-api-key": ALICE}).post("/v1/completions", json={"prompt": "hi", "n": 10})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_quota_exceeded"
    assert "your key has 70 sequences" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1
    other = server.http(headers={"x-api-key": BOB}).post("/v1/completions", json={"prompt": "hi", "n": 5, "max_tokens": 1})
    assert other.status_code == 200
    for stream in streams:
        stream.close()
    modest.close()


def test_no_key_has_more_than_its_quota_of_constraints(serve, answering):
    """Requests with too many different constraints are refused by name. A constraint that the key uses already costs nothing."""
    server = serve(script=answering("x" * 1000, interval_s=0.05), api_keys=(ALICE, BOB), max_key_constraints=2)

    def ask(key: str, regex: str, **fields):
        return server.openai(api_key=key).completions.create(model="null", prompt="hi", extra_body={"guided_regex": regex}, **fields)

    streams = [ask(ALICE, regex, stream=True) for regex in ("x+", "x*", "x+")]
    refused = server.http(headers={"x-api-key": ALICE}).post("/v1/completions", json={"prompt": "hi", "guided_regex": "y"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_quota_exceeded"
    assert "2 different constraints" in refused.json()["error"]["message"] and "max_key_constraints" in refused.json()["error"]["message"]
    assert ask(BOB, "y", max_tokens=1).choices
    for stream in streams:
        stream.close()


def test_no_key_deletes_the_stored_responses_of_others():
    """When the store is full, the key that stores most loses its least recently used response."""
    store = ResponseStore(1000, 3600.0)
    store.put(Stored("modest", "bob", b"x" * 300, ()))
    for number in range(10):
        store.put(Stored(f"flood-{number}", "alice", b"x" * 200, ()))
    assert store.get("modest", "bob").body and store.num_bytes <= 1000
    assert store.get("flood-9", "alice").body
    with pytest.raises(ApiError):
        store.get("flood-6", "alice")
    with pytest.raises(ApiError):
        store.get("modest", "alice")
