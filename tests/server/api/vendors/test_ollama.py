"""Ollama's endpoints: valid requests get answers with the documented fields, all of the documented types, and each field that Ollama's
client can send is handled as its row says."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from typing import Any

import httpx
import ollama
import pytest
from ollama._types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options

from tests.server.api.vendors.double import thinking
from tests.server.api.vendors.field import Handling, Row, drawn, honoured, no_effect, refused
from tests.server.conftest import with_answer

NUM_REQUESTS = 500
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
RUNNING = "how to run the model is decided when it is loaded"
NO_SAMPLER = "this sampler is not implemented"
OPTIONS: dict[str, Row] = {
    **dict.fromkeys(("numa", "low_vram", "use_mmap", "use_mlock"), no_effect(True, note=RUNNING)),
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread"), no_effect(1, note=RUNNING)),
    "num_keep": no_effect(1, note="the context is never shifted"),
    "penalize_newline": no_effect(True, note="penalties apply to line breaks, too"),
    "repeat_last_n": no_effect(64, note="penalties apply to the whole text; named in `X-Ignored-Params`"),
    "seed": honoured(7),
    "num_predict": honoured(5, -1),
    "top_k": honoured(5),
    "top_p": honoured(0.5),
    "typical_p": honoured(0.5),
    "temperature": honoured(0.5, 0),
    "repeat_penalty": honoured(1.5),
    "presence_penalty": honoured(0.5),
    "frequency_penalty": honoured(0.5),
    "stop": honoured(["null"]),
    "mirostat": refused(2, accepted=(0,), note=NO_SAMPLER),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), no_effect(5.0, note="without `mirostat`")),
    "tfs_z": refused(0.5, accepted=(1,), note=NO_SAMPLER),
    **dict.fromkeys(
        ("f16_kv", "logits_all", "vocab_only", "embedding_only"),
        no_effect(True, note="options of earlier versions of Ollama; named in `X-Ignored-Params`"),
    ),
}
FEW: tuple[Any, ...] = ({"seed": 7, "temperature": 0.5}, {"num_predict": 5, "num_ctx": 2048}, {"stop": ["null"]}, {})
SHARED: dict[str, Row] = {
    "model": honoured("null"),
    "stream": honoured(False, True),
    "format": honoured("json", SCHEMA, ""),
    "options": honoured(*FEW, note="see the [next table](#ollama-options)"),
    "keep_alive": no_effect("5m", 300, -1, note="models stay loaded; only 0 has an effect, it puts the model to sleep"),
    "think": honoured(True, False, "low", note="if the model has thoughts; otherwise named in `X-Ignored-Params`"),
    "logprobs": honoured(True),
    "top_logprobs": honoured(2, beside={"logprobs": True}),
}
CHAT: dict[str, Row] = {
    **SHARED,
    "messages": honoured(
        [{"role": "system", "content": "Be brief."}, *MESSAGES],
        [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "add", "content": "1"},
        ],
        refused=([{"role": "user", "content": "hi", "images": ["aGk="]}],),
        note="images only for vision models",
    ),
    "tools": honoured([TOOL]),
}
GENERATE: dict[str, Row] = {
    **SHARED,
    "prompt": honoured("hello"),
    "system": honoured("Be brief."),
    "raw": honoured(True, False),
    "suffix": refused("the end", note="unless the model can fill in the middle"),
    "template": refused("{{ .Prompt }}"),
    "context": refused([1, 2]),
    "images": refused(["aGk="], accepted=([],), note="unless the model reads images"),
    **dict.fromkeys(("width", "height", "steps"), no_effect(8, note="no images are generated; named in `X-Ignored-Params`")),
}
EMBED: dict[str, Row] = {
    "model": honoured("null"),
    "input": honoured("hello", ["a", "b"]),
    "truncate": honoured(True, False),
    "dimensions": honoured(4),
    "options": no_effect({"num_ctx": 2048}, {"temperature": 0}, note="none concerns embeddings"),
    "keep_alive": no_effect("5m", 300, -1, note="models stay loaded"),
}
EMBEDDINGS: dict[str, Row] = {name: EMBED[name] for name in ("model", "options", "keep_alive")} | {"prompt": honoured("hello")}
ENDPOINTS = {"/api/chat": CHAT, "/api/generate": GENERATE, "/api/embed": EMBED, "/api/embeddings": EMBEDDINGS}
TYPED = {"/api/chat": ChatRequest, "/api/generate": GenerateRequest, "/api/embed": EmbedRequest, "/api/embeddings": EmbeddingsRequest}
BASE: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "null", "messages": MESSAGES},
    "/api/generate": {"model": "null", "prompt": "hi"},
    "/api/embed": {"model": "null", "input": "hi"},
    "/api/embeddings": {"model": "null", "prompt": "hi"},
}
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
DRAWN = re.compile(r'"(created_at|[a-z_]*_duration)": ?("[^"]*"|\d+)')
pytestmark = pytest.mark.parametrize(
    "shared_server",
    [{"tokenizer": thinking(), "script": with_answer("Hello from the null device.", embedding_size=8, step=3)}],
    indirect=True,
)


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    client = server.clients[0] if server.clients else server.http()
    return client.post(path, json=body)


def require_part(path: str, part: dict[str, Any], *, is_last: bool) -> None:
    """Require the fields that Ollama documents for a line of an answer."""
    assert part["model"] == "null" and part["done"] is is_last and datetime.fromisoformat(part["created_at"])
    if path == "/api/chat":
        assert part["message"]["role"] == "assistant" and isinstance(part["message"]["content"], str)
        ollama.ChatResponse.model_validate_json(json.dumps(part), strict=True)
    else:
        assert isinstance(part["response"], str)
        ollama.GenerateResponse.model_validate_json(json.dumps(part), strict=True)
    if is_last:
        assert part["done_reason"] in ("stop", "length") and all(type(part[name]) is int and part[name] >= 0 for name in COUNTS), part
        assert part["eval_duration"] > 0 and part["prompt_eval_duration"] > 0, "clients divide by them"


def require_as_documented(path: str, response: httpx.Response, body: dict[str, Any]) -> None:
    assert response.status_code == 200, (response.text, body)
    if path == "/api/embed":
        answer = ollama.EmbedResponse.model_validate_json(response.content, strict=True)
        assert answer.model == "null" and answer.total_duration and answer.load_duration is not None and answer.prompt_eval_count
    elif path == "/api/embeddings":
        assert ollama.EmbeddingsResponse.model_validate_json(response.content, strict=True).embedding
    elif body.get("stream") is False:
        require_part(path, response.json(), is_last=True)
    else:
        *parts, last = [json.loads(line) for line in response.text.splitlines()]
        for part in parts:
            require_part(path, part, is_last=False)
        require_part(path, last, is_last=True)


def observed(server: Any, path: str, body: dict[str, Any]) -> Any:
    server.worker.submits.clear()
    server.worker.embeds.clear()
    response = post(server, path, body)
    require_as_documented(path, response, body)
    computed = [(each.prompt_ids, each.params) for each in server.worker.submits]
    return computed, [each.prompt_ids for each in server.worker.embeds], DRAWN.sub("", response.text)


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_every_field_of_the_client_has_a_row(server: Any, path: str) -> None:
    assert set(ENDPOINTS[path]) == set(TYPED[path].model_fields)
    assert set(OPTIONS) == set(Options.model_fields)


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_valid_requests_get_answers_with_the_documented_fields(server: Any, path: str) -> None:
    rng = random.Random(path)
    for _ in range(NUM_REQUESTS):
        body = drawn(ENDPOINTS[path], BASE[path], rng)
        require_as_documented(path, post(server, path, body), body)


CASES = [(path, name, "") for path, rows in ENDPOINTS.items() for name in rows] + [("/api/chat", name, "options") for name in OPTIONS]


@pytest.mark.parametrize(("path", "name", "within"), CASES)
def test_a_field_is_handled_as_its_row_says(server: Any, path: str, name: str, within: str) -> None:
    row = OPTIONS[name] if within else ENDPOINTS[path][name]

    def body_with(**fields: Any) -> dict[str, Any]:
        seeded = {"seed": 1, **fields} if within else {"seed": 1}
        options = {"options": seeded} if path in ("/api/chat", "/api/generate") else {}
        return {**BASE[path], **options, **row.beside, **({} if within else fields)}

    for value in row.refused:
        response = post(server, path, body_with(**{name: value}))
        assert response.status_code == 400 and re.search(rf"\b{name}\b", response.json()["error"]), response.text
    without, seen = observed(server, path, body_with()), [observed(server, path, body_with(**{name: value})) for value in row.accepted]
    if row.handling is not Handling.HONOURED:
        assert all(one == without for one in seen), "a value changes something"
    elif name not in ("model", "truncate"):
        assert any(one != without for one in seen), "no value changes anything"
