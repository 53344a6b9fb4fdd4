"""Anthropic's endpoints, measured by the typed models of its client: valid requests get answers of these types, and each field of a request
is handled as its row says. The client's models accept absent fields and other values; here they are validated strictly."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from pydantic import TypeAdapter

from server.models.state import ModelSpec
from tests.server.api.vendors.double import thinking
from tests.server.api.vendors.field import Handling, Row, drawn, honoured, no_effect, refused
from tests.server.conftest import with_answer

NUM_REQUESTS = 500
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
TOOLS = {"tools": [TOOL]}
USED = [*MESSAGES, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]}]
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
CACHED = {"type": "ephemeral"}
ROWS: dict[str, Row] = {
    "model": honoured("null"),
    "messages": honoured(
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": CACHED}]}],
        [*MESSAGES, {"role": "assistant", "content": "He"}],
        [*USED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}],
        refused=([{"role": "user", "content": [{"type": "image", "source": PNG}]}],),
        note="text, reasoning, tool calls and their results, and images for vision models; other blocks are refused",
    ),
    "max_tokens": honoured(5),
    "cache_control": no_effect(CACHED, None, note="the prefix cache finds shared prefixes by itself"),
    "container": refused("c_1", accepted=(None,)),
    "diagnostics": no_effect({}, None, note="sent by habit"),
    "inference_geo": no_effect("us", None, note="sent by habit"),
    "metadata": no_effect({"user_id": "u"}, note="sent by habit"),
    "output_config": honoured({"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "service_tier": no_effect("auto", "standard_only", note="sent by habit"),
    "speed": no_effect("standard", "fast", None, note="sent by habit"),
    "stop_sequences": honoured(["null"], ["from", "device"]),
    "stream": honoured(True, False),
    "system": honoured("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": CACHED}]),
    "temperature": honoured(0.5, 0.0),
    "thinking": honoured({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "between_tools"}),
    "tool_choice": honoured({"type": "any"}, {"type": "tool", "name": "add"}, {"type": "none"}, {"type": "auto"}, beside=TOOLS),
    "tools": honoured(
        [TOOL],
        [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        note="tools of Anthropic's own types are named in `X-Ignored-Params`",
    ),
    "top_k": honoured(5),
    "top_p": honoured(0.5),
    "user_profile_id": no_effect("u", note="sent by habit"),
    "workspace_id": no_effect("w", note="sent by habit"),
}
FORMER = {"temperature", "top_p", "top_k"}  # the client's types no longer have these fields, but all its older versions send them
COUNTED = {name: row for name, row in ROWS.items() if name in MessageCountTokensParams.__annotations__}
ENDPOINTS = {"/v1/messages": ROWS, "/v1/messages/count_tokens": COUNTED}
BASE: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "null", "max_tokens": 64, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "null", "messages": MESSAGES},
}
WHOLE, EVENT, COUNT = TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent), TypeAdapter(MessageTokensCount)
DRAWN = re.compile(r'"id": ?"[^"]*"')
pytestmark = pytest.mark.parametrize(
    "shared_server", [{"tokenizer": thinking(), "script": with_answer("Hello from the null device.", step=3)}], indirect=True
)


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    client = server.clients[0] if server.clients else server.http()
    return client.post(path, json=body)


def require_as_typed(path: str, response: httpx.Response, body: dict[str, Any]) -> None:
    assert response.status_code == 200, (response.text, body)
    if path != "/v1/messages":
        COUNT.validate_json(response.content, strict=True)
    elif not body.get("stream"):
        WHOLE.validate_json(response.content, strict=True)
    else:
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]
        kinds = [EVENT.validate_json(json.dumps(event), strict=True).type for event in events if event["type"] != "ping"]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"]), kinds


def observed(server: Any, path: str, body: dict[str, Any]) -> Any:
    server.worker.submits.clear()
    response = post(server, path, body)
    require_as_typed(path, response, body)
    return [(each.prompt_ids, each.params) for each in server.worker.submits], DRAWN.sub("", response.text)


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_every_field_of_the_client_has_a_row(server: Any, path: str) -> None:
    typed = MessageCreateParamsNonStreaming if path == "/v1/messages" else MessageCountTokensParams
    fields = {name for each in (typed, *typed.__orig_bases__) for name in getattr(each, "__annotations__", ())}
    assert set(ENDPOINTS[path]) - FORMER == fields


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_valid_requests_get_answers_of_the_client_s_types(server: Any, path: str) -> None:
    rng = random.Random(path)
    for _ in range(NUM_REQUESTS):
        body = drawn(ENDPOINTS[path], BASE[path], rng)
        require_as_typed(path, post(server, path, body), body)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, rows in ENDPOINTS.items() for name in rows])
def test_a_field_is_handled_as_its_row_says(server: Any, path: str, name: str) -> None:
    row = ENDPOINTS[path][name]
    base = {**BASE[path], **({"seed": 1} if path == "/v1/messages" else {}), **row.beside}
    for value in row.refused:
        response = post(server, path, {**base, name: value})
        assert response.status_code == 400 and re.match(rf"{name}\b", response.json()["error"]["param"]), response.text
    without = observed(server, path, {key: value for key, value in base.items() if key != name or key in BASE[path]})
    seen = [observed(server, path, {**base, name: value}) for value in row.accepted]
    if row.handling is not Handling.HONOURED:
        assert all(one == without for one in seen), "a value changes something"
    elif path == "/v1/messages" and name != "model":
        assert any(one != without for one in seen), "no value changes anything"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_have_the_client_s_types(serve: Any, shared_server: Any, stream: bool) -> None:
    said = '<think>hm</think>Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = serve(script=with_answer(said, step=5), initial=(ModelSpec("null", "null", tool_parser="hermes", reasoning=True),))
    body = {**BASE["/v1/messages"], **TOOLS, "max_tokens": 1024, "thinking": {"type": "adaptive"}, "stream": stream}
    response = post(server, "/v1/messages", body)
    require_as_typed("/v1/messages", response, body)
    assert '"name":"add"' in response.text and '"thinking"' in response.text
