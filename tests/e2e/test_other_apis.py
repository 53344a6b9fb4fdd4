"""Completion and embedding APIs other than OpenAI's, used over plain HTTP on a server with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="module")
def client(demo_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server.url, timeout=120, verify=False) as client:
        yield client


def test_the_vector_of_each_token_is_that_of_the_text_up_to_it(client):
    """With task `token_embed`, the vector of token n equals the embedding of the first n tokens, bit for bit. This holds although a long
    text takes several steps, and short texts share a step."""
    ids = client.post("/tokenize", json={"prompt": "The fox went home. " * 30}).json()["tokens"]
    rows = client.post("/pooling", json={"input": ids, "task": "token_embed"}).json()["data"][0]["data"]
    assert len(rows) == len(ids) > 64
    for end in (1, 2, 40, 65, len(ids)):
        whole = client.post("/v1/embeddings", json={"input": ids[:end]}).json()["data"][0]["embedding"]
        assert rows[end - 1] == whole


def test_llama_cpp_s_completion_is_the_completion(client):
    """llama.cpp's endpoint `/completion` gives the same text as OpenAI's `/v1/completions`, streamed and unstreamed."""
    body = {"prompt": "The fox", "seed": 3, "temperature": 0.8}
    plain = client.post("/v1/completions", json={**body, "max_tokens": 24}).json()
    whole = client.post("/completion", json={**body, "n_predict": 24}).json()
    assert whole["content"] == plain["choices"][0]["text"] and whole["tokens_predicted"] == plain["usage"]["completion_tokens"]
    events = client.post("/completion", json={**body, "n_predict": 24, "stream": True}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == whole["content"] and parts[-1]["stop"]


def test_llama_cpp_s_properties_show_the_template(client):
    assert "messages" in client.get("/props").json()["chat_template"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    answer = client.post("/completion", json={"prompt": "x", "json_schema": schema, "n_predict": 64, "seed": 1}).json()
    assert answer["stop_type"] == "limit" or isinstance(json.loads(answer["content"])["a"], int)
