"""LangChain's chat and embedding models for OpenAI's API. The chat model is used with chat completions and with responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from server.messages import ConstraintKind
from tests.doubles.worker import NullScript
from tests.lazily import imported_later
from tests.server.api.foreign_clients import ADD, CALL, HERMES, HI, LONG, SAID, SCHEMA

langchain = imported_later("langchain_openai")

BOTH = pytest.mark.parametrize("use_responses_api", [False, True], ids=["chat", "responses"])


@pytest.fixture
def transport() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False) as transport:  # loading certificates would take longer than most tests
        yield transport


@pytest.fixture
def connect(transport: httpx.Client) -> Callable[..., Any]:
    def connect(server, **options):
        common = {"model": "null", "api_key": "unused", "max_retries": 0, "http_client": transport, "stream_usage": True}
        return langchain.ChatOpenAI(base_url=f"{server.url}/v1", **{**common, **options})

    return connect


@BOTH
def test_an_answer_and_the_same_in_a_stream(server, connect, use_responses_api):
    model = connect(server, use_responses_api=use_responses_api)
    whole = model.invoke(HI)
    pieces = list(model.stream(HI))
    assert whole.text == "".join(piece.text for piece in pieces) == SAID and len(pieces) > len(SAID)
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == len(SAID)


@BOTH
def test_a_tool_is_called_and_its_result_sent(serve, answering, connect, use_responses_api):
    server = serve(script=answering(f"Sure.{CALL}"), initial=HERMES)
    model = connect(server, use_responses_api=use_responses_api).bind_tools([ADD])
    answer, total = model.invoke(HI), None
    for piece in model.stream(HI):
        total = piece if total is None else total + piece
    for made in (answer, total):
        assert [(call["name"], call["args"]) for call in made.tool_calls] == [("add", {"a": 1})] and made.text == "Sure."
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "two"}
    model.invoke([*HI, answer, result])
    prompt = bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()
    assert '"arguments": {"a": 1}' in prompt and "<|tool|>two" in prompt


@BOTH
def test_an_answer_is_read_as_a_schema_says(serve, answering, connect, use_responses_api):
    server = serve(script=answering('{"zebra": 3}'))
    model = connect(server, use_responses_api=use_responses_api).with_structured_output({"title": "animal", **SCHEMA})
    assert model.invoke(HI) == {"zebra": 3}
    constraint = server.worker.submits[-1].params.constraint
    assert constraint.kind is ConstraintKind.JSON_SCHEMA and '"zebra"' in constraint.source


@BOTH
def test_a_conversation_that_is_too_long_is_known_as_such(server, connect, use_responses_api):
    from langchain_core import exceptions

    with pytest.raises(exceptions.ContextOverflowError, match="maximum context length is 4096 tokens"):
        connect(server, use_responses_api=use_responses_api).invoke(LONG)


@BOTH
def test_keys_and_strictness(serve, connect, use_responses_api):
    """With a wrong key, LangChain raises an authentication error. A server with the setting `strict` accepts every field that LangChain
    sends by default."""
    server = serve(strict=True, api_keys=["a-key-of-a-client"])
    with pytest.raises(openai.AuthenticationError):
        connect(server, use_responses_api=use_responses_api).invoke(HI)
    model = connect(server, api_key="a-key-of-a-client", use_responses_api=use_responses_api, temperature=0.5, seed=None)
    assert model.bind_tools([ADD]).invoke(HI).text == "".join(piece.text for piece in model.stream(HI)) == SAID


def test_vectors(serve, transport):
    server = serve(script=NullScript(embedding_size=8))
    common = {"model": "null", "api_key": "unused", "max_retries": 0, "http_client": transport}
    model = langchain.OpenAIEmbeddings(base_url=f"{server.url}/v1", check_embedding_ctx_length=False, **common)
    rows = server.http().post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
    assert model.embed_documents(["a", "b"]) == [row["embedding"] for row in rows] and model.embed_query("a") == rows[0]["embedding"]
