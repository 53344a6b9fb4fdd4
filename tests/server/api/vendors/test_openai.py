"""OpenAI's endpoints, measured by the OpenAPI document that OpenAI publishes: requests that it allows get answers that it describes, and
each field of a request is handled as `openai_rows.py` says.

The answers deviate from the document's schemas in four places. In the first three, a null stands for what is not known:

- `finish_reason` in chunks of completions before the last one, as in the document's own example of such a stream
- `usage` in these chunks if the request sets `include_usage`, as the document's description of that field says
- the first entries of `token_logprobs` and `top_logprobs` of an echoed prompt, whose first token follows no other
- embeddings are texts if the request sets `encoding_format` to `base64`; the document describes the value, and only lists in the answer
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest

from tests.server.api.vendors.double import thinking
from tests.server.api.vendors.field import Handling, Row, drawn
from tests.server.api.vendors.openai_rows import BASE, ENDPOINTS, repaired
from tests.server.conftest import with_answer

DOCUMENT = json.loads((Path(__file__).parents[3] / "golden" / "vendors" / "openai.json").read_text())
NUM_REQUESTS = 500
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, COUNTED = ENDPOINTS
WHOLE, STREAM = "application/json", "text/event-stream"
pytestmark = pytest.mark.parametrize(
    "shared_server",
    [{"tokenizer": thinking(), "script": with_answer("Hello from the null device.", embedding_size=8, step=3)}],
    indirect=True,
)


@cache
def validator(endpoint: str, kind: str) -> Any:
    """Return the validator of an endpoint's requests, or of its answers of a media type."""
    stated = DOCUMENT["endpoints"][endpoint]
    return of(stated["request"] if kind == "request" else stated["answers"][kind])


def of(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": DOCUMENT["$defs"]})


@cache
def event_validator(kind: str) -> Any:
    """Return the validator of an event of /responses. Errors of the union of all events would not be readable."""
    union = DOCUMENT["$defs"]["ResponseStreamEvent"]
    members = [part["$ref"].rpartition("/")[2] for part in union.get("anyOf") or union["oneOf"]]
    (name,) = [name for name in members if kind in DOCUMENT["$defs"][name]["properties"]["type"]["enum"]]
    return of(DOCUMENT["$defs"][name])


def faults(check: Any, value: Any) -> list[str]:
    return [f"{'.'.join(map(str, e.instance_path))}: {e.message:.200}" for e in check.iter_errors(value)]


def require_valid(check: Any, value: Any, body: Any) -> None:
    assert check.is_valid(value), (faults(check, value), value, body)


def properties(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the fields of a request."""
    if "$ref" in schema:
        yield from properties(DOCUMENT["$defs"][schema["$ref"].rpartition("/")[2]])
    yield from schema.get("properties", {})
    for part in schema.get("allOf", ()):
        yield from properties(part)


def post(server: Any, endpoint: str, body: dict[str, Any]) -> httpx.Response:
    return client_of(server).post(f"/v1{endpoint.removeprefix('POST ')}", json=body)


def client_of(server: Any) -> httpx.Client:
    return server.clients[0] if server.clients else server.http()


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def without_deviations(endpoint: str, value: Any) -> Any:
    """Return an answer in which the deviations have been replaced by what the schema allows."""
    if endpoint == EMBEDDINGS:
        for one in value["data"]:
            if isinstance(one["embedding"], str):
                one["embedding"] = np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist()
    if endpoint != COMPLETIONS:
        return value
    value = {name: part for name, part in value.items() if name != "usage" or part is not None}
    for choice in value["choices"]:
        if choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        if choice["logprobs"] is not None:
            if choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"]["token_logprobs"][0] = 0.0
            if choice["logprobs"]["top_logprobs"][:1] == [None]:
                choice["logprobs"]["top_logprobs"][0] = {}
    return value


def require_as_stated(endpoint: str, response: httpx.Response, body: dict[str, Any]) -> None:
    assert response.status_code == 200, (response.text, body)
    if not body.get("stream"):
        require_valid(validator(endpoint, WHOLE), without_deviations(endpoint, response.json()), body)
        return
    events = events_of(response)
    assert events, (response.text, body)
    if endpoint == COMPLETIONS:
        last = [event for event in events if event["choices"]][-1]
        assert all(choice["finish_reason"] for choice in last["choices"])
    for event in events:
        check = (
            event_validator(event["type"]) if endpoint == RESPONSES else validator(endpoint, WHOLE if endpoint == COMPLETIONS else STREAM)
        )
        require_valid(check, without_deviations(endpoint, event), body)


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_every_field_of_the_document_has_a_row(server: Any, endpoint: str) -> None:
    assert set(ENDPOINTS[endpoint]) == set(properties(DOCUMENT["endpoints"][endpoint]["request"]))


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_allowed_requests_get_answers_as_the_document_states_them(server: Any, endpoint: str) -> None:
    rng = random.Random(endpoint)
    for _ in range(NUM_REQUESTS):
        body = repaired(endpoint, drawn(ENDPOINTS[endpoint], BASE[endpoint], rng))
        require_valid(validator(endpoint, "request"), body, body)
        require_as_stated(endpoint, post(server, endpoint, body), body)


ROWS = [(endpoint, name) for endpoint, rows in ENDPOINTS.items() for name in rows]
DRAWN = re.compile(r'"(id|item_id|created|created_at|completed_at|first_id|last_id)": ?("[^"]*"|\d+)')


def observed(server: Any, endpoint: str, body: dict[str, Any]) -> Any:
    """Return what a request makes the worker compute, and the answer without ids and times."""
    server.worker.submits.clear()
    server.worker.embeds.clear()
    response = post(server, endpoint, body)
    require_as_stated(endpoint, response, body)
    computed = [(each.prompt_ids, each.num_choices, each.params) for each in server.worker.submits]
    return computed, [each.prompt_ids for each in server.worker.embeds], DRAWN.sub("", response.text)


@pytest.mark.parametrize(("endpoint", "name"), ROWS)
def test_a_field_is_handled_as_its_row_says(server: Any, endpoint: str, name: str) -> None:
    row: Row = ENDPOINTS[endpoint][name]
    seeded = {} if endpoint in (EMBEDDINGS, COUNTED) else {"seed": 1}
    base = {**BASE[endpoint], **seeded, **row.beside}
    for value in (*row.accepted, *row.refused):
        require_valid(validator(endpoint, "request"), {**base, name: value}, name)
    for value in row.refused:
        response = post(server, endpoint, {**base, name: value})
        error = response.json()["error"]
        assert response.status_code == 400 and re.match(rf"{name}\b", error["param"]), (value, error)
        require_valid(of({"$ref": "#/$defs/ErrorResponse"}), response.json(), value)
    without = observed(server, endpoint, {key: value for key, value in base.items() if key != name or key in BASE[endpoint]})
    seen = [observed(server, endpoint, {**base, name: value}) for value in row.accepted]
    if row.handling is Handling.HONOURED and name not in ("model", "previous_response_id", "store") and endpoint != COUNTED:
        assert any(one != without for one in seen), "no value changes anything"
    elif row.handling is not Handling.HONOURED:
        assert all(one == without for one in seen), "a value changes something"


def test_models_are_listed_as_the_document_states(server: Any) -> None:
    for path, endpoint in (("/v1/models", "GET /models"), ("/v1/models/null", "GET /models/{model}")):
        require_valid(validator(endpoint, WHOLE), client_of(server).get(path).json(), path)


def test_stored_responses_are_returned_as_the_document_states_them(server: Any) -> None:
    made = post(
        server, RESPONSES, {"model": "null", "input": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}
    ).json()
    found = client_of(server).get(f"/v1/responses/{made['id']}").json()
    require_valid(validator("GET /responses/{response_id}", WHOLE), found, made)
    assert found == made
    items = client_of(server).get(f"/v1/responses/{made['id']}/input_items").json()
    require_valid(validator("GET /responses/{response_id}/input_items", WHOLE), items, made)
    rest = client_of(server).get(f"/v1/responses/{made['id']}/input_items", params={"after": items["data"][-1]["id"]}).json()
    require_valid(validator("GET /responses/{response_id}/input_items", WHOLE), rest, made)
    assert rest["data"] == []
    next_one = {"model": "null", "input": "c", "previous_response_id": made["id"]}
    require_as_stated(RESPONSES, post(server, RESPONSES, next_one), next_one)


CALLING = {"script": with_answer(f"<think>hm</think>Sure.{CALL}", step=5), "reasoning": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_thoughts_and_calls_are_as_the_document_states_them(serve: Any, shared_server: Any, endpoint: str, stream: bool) -> None:
    from server.models.state import ModelSpec

    server = serve(script=CALLING["script"], initial=(ModelSpec("null", "null", tool_parser="hermes", reasoning=True),))
    body = {**BASE[endpoint], "tools": ENDPOINTS[endpoint]["tools"].accepted[0], "stream": stream}
    response = post(server, endpoint, body)
    require_as_stated(endpoint, response, body)
    assert '"name":"add"' in response.text


def test_errors_are_as_the_document_states_them(server: Any) -> None:
    for endpoint in ENDPOINTS:
        for body in ({}, {**BASE[endpoint], "model": "nobody"}, {**BASE[endpoint], "user": 7}):
            response = post(server, endpoint, body)
            if response.status_code != 200:
                require_valid(of({"$ref": "#/$defs/ErrorResponse"}), response.json(), body)
