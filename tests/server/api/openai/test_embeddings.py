from __future__ import annotations

import asyncio
import base64
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from server.interfaces import RequestError
from server.messages import Embed, Embedding, ErrorCode
from server.models.state import ModelSpec


@pytest.fixture
def embedder(serve, answering):
    return serve(script=answering("", embedding_size=8, generates=False))


def test_vectors(embedder):
    answer = embedder.openai().embeddings.create(model="null", input=["a", "b", "abc"], encoding_format="float")
    assert [row.index for row in answer.data] == [0, 1, 2] and len(answer.data[0].embedding) == 8
    assert answer.data[0].embedding != answer.data[1].embedding
    assert sum(v * v for v in answer.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == 2 + 2 + 4


def test_base64_is_the_default_of_the_client_and_the_same(embedder):
    client = embedder.openai()
    floats = client.embeddings.create(model="null", input="a", encoding_format="float").data[0].embedding
    assert client.embeddings.create(model="null", input="a").data[0].embedding == pytest.approx(floats, abs=1e-6)
    raw = embedder.http().post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<8f", base64.b64decode(raw)) == pytest.approx(floats, abs=1e-6)


def test_fewer_dimensions_have_length_one_again(embedder):
    client = embedder.openai()
    whole = client.embeddings.create(model="null", input="a").data[0].embedding
    short = client.embeddings.create(model="null", input="a", dimensions=3).data[0].embedding
    assert len(short) == 3 and sum(v * v for v in short) == pytest.approx(1, abs=1e-5)
    assert short[0] / short[1] == pytest.approx(whole[0] / whole[1], rel=1e-4)


@pytest.mark.parametrize("refuses", [False, True])
def test_vectors_of_two_fingerprints_are_in_no_answer(embedder, monkeypatch, refuses):
    """The worker dies between two texts of a request, and the model's files were replaced meanwhile. The new worker may not know the tokens
    of the old files."""
    worker = embedder.worker
    embed = worker.embed

    async def replaced(asked: Embed) -> Embedding:
        if len(worker.embeds) == 1:
            worker.ready = msgspec.structs.replace(worker.ready, fingerprint="fp_other")
            if refuses:
                raise RequestError(ErrorCode.INVALID_VALUE, "the prompt has an unknown token")
        return await embed(asked)

    monkeypatch.setattr(worker, "embed", replaced)
    answer = embedder.http().post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_not_ready"
    assert "has the fingerprint fp_other since its restart" in answer.text
    asyncio.run_coroutine_threadsafe(worker.before_change(worker.ready), embedder.loop).result(60)
    monkeypatch.setattr(worker, "embed", embed)
    assert embedder.http().post("/v1/embeddings", json={"input": ["a", "b", "c"]}).status_code == 200


@pytest.mark.parametrize("form", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_forms_of_input(embedder, form):
    assert embedder.http().post("/v1/embeddings", json={"input": form}).status_code == 200


@pytest.fixture
def prompted(serve, answering):
    prompts = (("query", "Find: "), ("document", ""))
    return serve(script=answering("", embedding_size=8, generates=False, normalize=False, prompts=prompts, default_prompt="query"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input": "abc"}, "Find: abc"),
        ({"input": ["abc"], "prompt_name": "query"}, "Find: abc"),
        ({"input": "abc", "prompt_name": "document"}, "abc"),
        ({"input": "abc", "prompt_name": ""}, "abc"),
        ({"input": [97, 98, 99]}, None),
    ],
)
def test_the_prompt_of_the_model_goes_before_texts(prompted, body, text):
    answer = prompted.http().post("/v1/embeddings", json=body).json()
    plain = {"input": [97, 98, 99]} if text is None else {"input": text, "prompt_name": ""}
    assert answer["data"] == prompted.http().post("/v1/embeddings", json=plain).json()["data"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"input": "a", "prompt_name": "passage"}, "one of document, query"),
        ({"input": [[1, 2]], "prompt_name": "query"}, "token ids"),
    ],
)
def test_a_prompt_that_cannot_be_put_is_refused(prompted, body, complaint):
    error = prompted.http().post("/v1/embeddings", json=body).json()["error"]
    assert error["param"] == "prompt_name" and complaint in error["message"]


def test_length_is_as_the_model_says_unless_asked(prompted):
    for body, unit in (({}, False), ({"normalize": True}, True)):
        (row,) = prompted.http().post("/v1/embeddings", json={"input": "a", **body}).json()["data"]
        assert (sum(v * v for v in row["embedding"]) == pytest.approx(1, abs=1e-5)) is unit


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": []}, "invalid_value"),
        ({"input": "a", "dimensions": 9}, "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value"),
        ({"input": "x" * 9000}, "context_length_exceeded"),
        ({"input": "a", "endianness": "big"}, "unsupported_field"),
        ({}, "missing_field"),
    ],
)
def test_refusals(embedder, body, code):
    response = embedder.http().post("/v1/embeddings", json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == code


def test_a_deadline_holds(serve, answering):
    server = serve(script=answering("", embedding_size=8, generates=False, prefill_s=30))
    response = server.http().post("/v1/embeddings", json={"input": ["a", "b"], "timeout": 0.1})
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    assert server.registry.models()[0].loaded.admission.num_sequences == 0


def test_a_generator_is_not_asked_for_text(embedder):
    assert embedder.chat().json()["error"]["code"] == "not_a_generative_model"


def test_a_request_of_many_texts_leaves_room_for_others(serve, answering):
    """A request with 40 texts does not fill the queue of 8 places: the server hands the worker only a few texts at a time, so a request
    that arrives meanwhile is admitted."""
    spec = ModelSpec("null", "null", max_batch=4)
    script = answering("x" * 200, interval_s=0.02, embedding_size=8, prefill_s=0.05)
    server = serve(script=script, initial=[spec], max_queued_requests=8)
    streams = server.openai().completions.create(model="null", prompt="a", max_tokens=200, stream=True)
    next(iter(streams))
    texts = [f"text {i}" for i in range(40)]
    with ThreadPoolExecutor(1) as pool:
        vectors = pool.submit(lambda: server.openai().embeddings.create(model="null", input=texts, encoding_format="float"))
        while not server.worker.embeds:
            time.sleep(0.005)
        assert len(server.worker.embeds) <= 8
        assert server.complete(max_tokens=1).status_code == 200, "another request must fit beside the texts"
        data = vectors.result(60).data
    streams.close()
    assert [row.index for row in data] == list(range(40))
    alone = server.openai().embeddings.create(model="null", input=texts[33], encoding_format="float").data[0].embedding
    assert data[33].embedding == alone
