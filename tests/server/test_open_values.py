"""An ingress that decides what a request leaves open gets the same bytes from any server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from server.messages import Submit
from server.open_values import HEADER, OPEN, OpenValues, given, new_hex, new_letters, new_seed, turn_to
from server.settings import ServerSettings, SettingsError
from tests.doubles.worker import ByteTokenizer, NullScript

KEY, NONCE, CREATED = "an-ingress-key-of-tests", "c0ffee00112233445566778899aabbcc", 1_700_000_000
VALUES = f"{KEY} {NONCE} {CREATED}"
ASKED = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = b'<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def by_seed(submit: Submit, choice: int) -> list[list[int]]:
    """Answer with text that depends on the seed and the choice, in one token a byte."""
    return [[byte] for byte in b"%d.%d " % (submit.params.seed, choice) + CALL]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASKED, "n": 3, "tools": [TOOL]}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": 500, "model": "null"}),
    ("/v1/responses", {"input": "hi"}),
    ("/api/chat", {"messages": ASKED, "model": "null"}),
    ("/api/generate", {"prompt": "hi", "model": "null"}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 500}, "model": "null"}),
]
# Times and what a cache found, which are facts about one server; they come with the last event.
FACTS = re.compile(rb'"(\w+_duration|completed_at)":\d+')


@pytest.fixture
def two(serve):
    tokenizer = ByteTokenizer(specials=["<tool_call>", "</tool_call>"])
    return [serve(script=NullScript(answer=by_seed), tokenizer=tokenizer, ingress_key=KEY) for _ in range(2)]


def stream_of(server, path: str, body: dict[str, Any], header: str) -> tuple[bytes, dict[str, str]]:
    """Return the stream, its events sorted by choice."""
    answer = server.http(headers={HEADER: header}).post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = FACTS.sub(b"", answer.content).split(b"\n")
    choice = re.compile(rb'"choices":\[\{"index":(\d+)')
    events.sort(key=lambda event: int(found[1]) if (found := choice.search(event)) else -1)
    return b"\n".join(events), dict(answer.headers)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_equal_open_values_give_equal_bytes(two, path: str, body: dict[str, Any]) -> None:
    one, headers = stream_of(two[0], path, body, VALUES)
    other, _ = stream_of(two[1], path, body, VALUES)
    assert one == other
    assert headers[HEADER] == "fp_null"
    assert b"c0ffee00" in one or path.startswith("/api/")  # ids begin as the nonce does
    changed, _ = stream_of(two[1], path, body, VALUES.replace("33", "44"))
    assert changed != one


@pytest.mark.parametrize("header", ["", NONCE, f"another-ingress-key {NONCE} {CREATED}", f"{KEY} {NONCE}", f"{KEY} xyz {CREATED}", "ü" * 9])
def test_only_the_ingress_decides(two, header: str) -> None:
    sent = header.encode()
    first, second = (two[0].http(headers={HEADER: sent}).post("/v1/completions", json={"prompt": "a"}) for _ in range(2))
    assert HEADER not in first.headers
    assert first.json()["id"] != second.json()["id"]
    assert first.json()["created"] != CREATED


def test_a_server_without_a_key_takes_open_values_from_nobody(serve) -> None:
    answer = serve().http(headers={HEADER: VALUES}).post("/v1/completions", json={"prompt": "a"})
    assert HEADER not in answer.headers
    assert NONCE[:8] not in answer.text
    assert given(f" {NONCE} {CREATED}", "") is None


def test_the_seed_of_a_request_counts_before_that_of_the_nonce(two) -> None:
    http = two[0].http(headers={HEADER: VALUES})
    http.post("/v1/completions", json={"prompt": "a", "seed": 7})
    http.post("/v1/completions", json={"prompt": "a"})
    given_seed, drawn = (submit.params.seed for submit in two[0].worker.submits)
    assert given_seed == 7 != drawn


def test_values_of_a_choice_do_not_depend_on_the_turns_of_others() -> None:
    def draw(turns: str) -> dict[str, list[str]]:
        OPEN.set(OpenValues(bytes.fromhex(NONCE), CREATED))
        found: dict[str, list[str]] = {}
        for turn in turns:
            turn_to(int(turn))
            found.setdefault(turn, []).append(new_letters("call", 9))
        OPEN.set(None)
        return found

    assert draw("0101") == draw("1100") == draw("0011")
    assert len({call for calls in draw("0101").values() for call in calls}) == 4


@pytest.mark.parametrize(
    "make", [lambda: new_hex("resp", 16), lambda: new_letters("call", 24), lambda: str(new_seed())], ids=["hex", "letters", "seed"]
)
def test_values_differ(make: Callable[[], str]) -> None:
    assert len({make() for _ in range(50)}) == 50  # random ones
    OPEN.set(OpenValues(bytes.fromhex(NONCE), CREATED))
    drawn = [make() for _ in range(50)]
    OPEN.set(None)
    assert len({*drawn}) == 50
    assert len({*map(len, drawn)}) == 1 or drawn[0].isdigit()


def test_a_weak_key_is_refused() -> None:
    with pytest.raises(SettingsError, match="ingress_key has another form; expected 16 to 200 printable"):
        ServerSettings(ingress_key="short")


def test_a_call_has_an_id_of_the_nonce_in_whole_answers_too(two) -> None:
    bodies = [
        server.http(headers={HEADER: VALUES}).post("/v1/chat/completions", json={"messages": ASKED, "tools": [TOOL]}).json()
        for server in two
    ]
    assert bodies[0]["choices"][0]["message"]["tool_calls"]
    for body in bodies:
        body.pop("usage")
    assert json.dumps(bodies[0]) == json.dumps(bodies[1])
