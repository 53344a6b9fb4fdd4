"""The entry of a model in a server's list of models is read, and a model that Dynamo cannot serve is refused."""

from __future__ import annotations

import json

import pytest

from deploy.dynamo.entry import Entry, entry_in
from server.settings import SettingsError
from tests.deploy.dynamo.scripted import ENTRY, listing

URL = "http://host:8000"


def test_a_model_is_found_by_its_name() -> None:
    answer = listing({**ENTRY, "id": "other"}, {**ENTRY, "more": 1})
    assert entry_in(answer.content, "m", URL) == Entry("m", generates=True, aliases=("alias",), max_model_len=64)


def test_an_alias_with_defaults_of_its_own_is_another_model() -> None:
    variant = {**ENTRY, "id": "variant", "aliases": []}
    answer = listing({**ENTRY, "aliases": ["alias", "variant"]}, variant).content
    assert entry_in(answer, "m", URL).aliases == ("alias",)
    assert entry_in(answer, "variant", URL).aliases == ()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"id": "other"}, "the server at http://host:8000 has no model 'm'; it has: other. Name one as MODEL=NAME"),
        ({"max_model_len": None}, "the server at http://host:8000 has no model 'm'; it has: m. Name one as MODEL=NAME"),
        ({"generates": False}, "the model m generates no text; expected one that does"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(entry: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError) as found:
        entry_in(listing({**ENTRY, **entry}).content, "m", URL)
    assert str(found.value) == why


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"data": [{"id": "m", "object": "model", "max_model_len": 64}]}).encode(),  # as vLLM lists it
        b"<html>It works!</html>",
        b"",
        b"\xff",
        b"[]",
        b'{"data":5}',
        b'{"data":[5]}',
        b'{"data":[],"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_another_server_is_named(answer: bytes) -> None:
    with pytest.raises(
        SettingsError, match=r"^the server at http://host:8000 is no relaxserve: its answer to /v1/models is b.*; expected "
    ):
        entry_in(answer, "m", URL)
