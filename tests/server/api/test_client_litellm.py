"""LiteLLM with each API that it supports: chat and responses of OpenAI, messages of Anthropic, chat of Ollama, reranking of Cohere and
Jina."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.worker import NullScript
from tests.lazily import imported_later
from tests.server.api.foreign_clients import ADD, CALL, HERMES, HI, LONG, SAID, SCHEMA

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without this, importing LiteLLM downloads a price list
litellm = imported_later("litellm")

KEY = "a-key-of-a-client"
# name of the model in LiteLLM -> path of the API that LiteLLM uses for this name
MODELS = {"hosted_vllm/null": "/v1", "openai/null": "/v1", "anthropic/null": "", "ollama_chat/null": ""}
# With Ollama's API, LiteLLM omits the tool calls of earlier messages, and raises the same exception for all errors.
SENDS_NO_CALLS = TELLS_NO_ERRORS_APART = {"ollama_chat/null"}
EVERY = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(autouse=True)
def event_loop() -> Iterator[None]:
    """LiteLLM asks for the thread's event loop. If the thread has none, asyncio creates one that nobody closes, and a later test fails when
    the collector finds it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def ask(server, model: str, messages: list[dict[str, Any]] = HI, **options: Any) -> Any:
    base = server.url + MODELS[model]
    return litellm.completion(model, messages, **{"api_base": base, "api_key": KEY, "max_retries": 0, "max_tokens": 100, **options})


@EVERY
def test_an_answer_and_the_same_in_a_stream(server, model):
    whole = ask(server, model)
    pieces = list(ask(server, model, stream=True))
    assert whole.choices[0].message.content == SAID and whole.choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == SAID
    assert whole.usage.completion_tokens == len(SAID)


@EVERY
def test_a_tool_is_called_and_its_result_sent(serve, answering, model):
    server = serve(script=answering(f"Sure.{CALL}"), initial=HERMES)
    whole = ask(server, model, tools=[ADD])
    pieces = list(ask(server, model, tools=[ADD], stream=True))
    for message in (whole.choices[0].message, litellm.stream_chunk_builder(pieces).choices[0].message):
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments), message.content) == ("add", {"a": 1}, "Sure.")
    result = {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "two"}
    ask(server, model, [*HI, whole.choices[0].message.model_dump(), result], tools=[ADD])
    prompt = bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()
    assert "<|tool|>two" in prompt and ('"arguments": {"a": 1}' in prompt or model in SENDS_NO_CALLS)


@EVERY
def test_an_answer_is_held_to_a_schema(serve, answering, model):
    # litellm asks Anthropic's API for a schema as a demanded call
    answer = '{"name": "json_tool_call", "arguments": {"zebra": 3}}' if model.startswith("anthropic/") else '{"zebra": 3}'
    server = serve(script=answering(answer))
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    assert json.loads(ask(server, model, response_format=form).choices[0].message.content) == {"zebra": 3}
    assert '"zebra"' in server.worker.submits[-1].params.constraint.source


@EVERY
def test_a_conversation_that_is_too_long_is_known_as_such(server, model):
    error = litellm.APIConnectionError if model in TELLS_NO_ERRORS_APART else litellm.ContextWindowExceededError
    with pytest.raises(error, match="maximum context length is 4096 tokens"):
        ask(server, model, LONG)


@EVERY
def test_keys_and_strictness(serve, model):
    """With a wrong key, LiteLLM raises an exception. A server with the setting `strict` accepts every field that LiteLLM sends by
    default."""
    server = serve(strict=True, api_keys=[KEY])
    with pytest.raises(litellm.APIConnectionError if model in TELLS_NO_ERRORS_APART else litellm.AuthenticationError):
        ask(server, model, api_key="another")
    said = "".join(piece.choices[0].delta.content or "" for piece in ask(server, model, stream=True, temperature=0.5, stop=["Z"]))
    assert ask(server, model).choices[0].message.content == said == SAID


def test_responses(server):
    asked = {"model": "openai/null", "input": "hi", "api_base": f"{server.url}/v1", "api_key": KEY}
    whole = litellm.responses(**asked)
    events = list(litellm.responses(**asked, stream=True))
    assert whole.output[0].content[0].text == SAID
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID


def test_vectors_and_ranks(serve):
    server = serve(script=NullScript(embedding_size=8))
    rows = server.http().post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
    for model, base in (("openai/null", "/v1"), ("hosted_vllm/null", "/v1"), ("ollama/null", "")):
        found = litellm.embedding(model, ["a", "b"], api_base=server.url + base, api_key=KEY)
        assert [row["embedding"] for row in found.data] == [row["embedding"] for row in rows], model
    whole = server.http().post("/v1/rerank", json={"query": "a", "documents": ["a", "b", "c"]}).json()["results"]
    for model, base in (("cohere/null", "/v1/rerank"), ("jina_ai/null", "/v1/rerank"), ("hosted_vllm/null", "")):
        found = litellm.rerank(model, "a", ["a", "b", "c"], api_base=server.url + base, api_key=KEY)
        assert [(row["index"], row["relevance_score"]) for row in found.results] == [
            (row["index"], row["relevance_score"]) for row in whole
        ], model
