"""Cohere's Python client: embeddings, reranking and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.doubles.worker import NullScript
from tests.lazily import imported_later

cohere = imported_later("cohere")

DOCUMENTS = ["alpha", "beta", "gamma"]
pytestmark = pytest.mark.parametrize("shared_server", [{"script": NullScript(embedding_size=8)}], indirect=True, ids=[""], scope="module")


@pytest.fixture(params=["keyless", "keyed and strict"])
def client(request, server, serve) -> Iterator[Any]:
    if request.param != "keyless":
        server = serve(script=server.script, strict=True, api_keys=["a-key-of-a-client"])
    with httpx.Client(verify=False) as transport:  # loading certificates would take longer than most tests
        yield cohere.ClientV2(api_key="a-key-of-a-client", base_url=server.url, httpx_client=transport)


def test_vectors(server, client):
    answer = client.embed(model="null", texts=DOCUMENTS, input_type="search_document", embedding_types=["float"])
    rows = server.http().post("/v1/embeddings", json={"input": DOCUMENTS}).json()["data"]
    assert [list(vector) for vector in answer.embeddings.float_] == [row["embedding"] for row in rows]
    assert answer.meta.billed_units.input_tokens == sum(len(text) + 1 for text in DOCUMENTS)


def test_ranks(server, client):
    answer = client.rerank(model="null", query="a", documents=DOCUMENTS, top_n=2)
    whole = server.http().post("/v1/rerank", json={"query": "a", "documents": DOCUMENTS}).json()
    assert [(result.index, result.relevance_score) for result in answer.results] == [
        (result["index"], result["relevance_score"]) for result in whole["results"][:2]
    ]
    assert answer.meta.billed_units.search_units == 1


def test_errors(client):
    with pytest.raises(cohere.errors.BadRequestError, match="maximum context length is 4096 tokens"):
        client.embed(model="null", texts=["x" * 9000], input_type="search_document", truncate="NONE")
    with pytest.raises(cohere.errors.NotFoundError, match="other"):
        client.rerank(model="other", query="a", documents=DOCUMENTS)


def test_a_key_is_asked_for(shared_server, serve):
    with httpx.Client(verify=False) as transport, pytest.raises(cohere.errors.UnauthorizedError):
        url = serve(api_keys=["a-key-of-a-client"]).url
        cohere.ClientV2(api_key="another", base_url=url, httpx_client=transport).rerank(model="null", query="a", documents=DOCUMENTS)
