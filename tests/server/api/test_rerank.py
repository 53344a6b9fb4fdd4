"""The endpoints for reranking and scoring, in the formats of Cohere, Jina and vLLM."""

from __future__ import annotations

import logging

import numpy as np
import pytest

DOCUMENTS = ["alpha", "beta", {"text": "gamma"}]
TEXTS = ["alpha", "beta", "gamma"]


@pytest.fixture
def embedder(serve, answering):
    return serve(script=answering("", embedding_size=8, generates=False))


def vectors(server, texts, **fields):
    rows = server.http().post("/v1/embeddings", json={"input": texts, "normalize": True, **fields}).json()["data"]
    return np.array([row["embedding"] for row in rows])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"])
def test_documents_are_ordered_by_their_cosine(embedder, path):
    answer = embedder.http().post(path, json={"model": "null", "query": "a", "documents": DOCUMENTS}).json()
    cosines = vectors(embedder, TEXTS) @ vectors(embedder, ["a"])[0]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-5)
        assert result["document"]["text"] == TEXTS[result["index"]]
    assert answer["usage"]["total_tokens"] == sum(len(text) + 1 for text in ["a", *TEXTS])
    assert answer["scoring"] == "cosine"
    assert answer["model"] == "null" and answer["id"] and answer["meta"]["billed_units"]["search_units"] == 1


@pytest.mark.parametrize(("path", "texts"), [("/rerank", {"query": "a", "documents": TEXTS}), ("/score", {"text_1": "a", "text_2": TEXTS})])
def test_an_instruction_is_refused_by_a_model_that_reads_none(embedder, path, texts):
    refused = embedder.http().post(path, json={**texts, "instruction": "Find cats."})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "instruction"


def test_the_best_without_their_texts(embedder):
    body = {"query": "a", "documents": TEXTS, "top_n": 2, "return_documents": False}
    results = embedder.http().post("/v1/rerank", json=body).json()["results"]
    assert len(results) == 2 and all("document" not in result for result in results)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_one_to_many_and_of_pairs(embedder, path):
    client, found = embedder.http(), vectors(embedder, TEXTS)
    one = client.post(path, json={"text_1": "alpha", "text_2": TEXTS}).json()
    assert one["scoring"] == "cosine"
    assert [row["score"] for row in one["data"]] == pytest.approx(list(found @ found[0]), abs=1e-5)
    assert one["data"][0]["score"] == pytest.approx(1, abs=1e-5) and [row["index"] for row in one["data"]] == [0, 1, 2]
    pairs = client.post(path, json={"queries": TEXTS, "documents": TEXTS[::-1]}).json()["data"]
    assert [row["score"] for row in pairs] == pytest.approx(list((found * found[::-1]).sum(axis=1)), abs=1e-5)
    assert client.post(path, json={"data_1": "alpha", "data_2": "alpha"}).json()["data"][0]["object"] == "score"


def test_queries_and_documents_go_behind_the_model_s_prompts(serve, answering):
    prompts = (("query", "Find: "), ("passage", "P: "))
    server = serve(script=answering("", embedding_size=8, prompts=prompts, default_prompt="query"))
    usage = server.http().post("/v1/rerank", json={"query": "a", "documents": ["b"]}).json()["usage"]
    assert usage["total_tokens"] == len("Find: a") + 1 + len("P: b") + 1


def test_long_documents_are_cut_where_the_request_says_so(embedder):
    body = {"query": "a", "documents": ["x" * 9000]}
    error = embedder.http().post("/v1/rerank", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents")
    assert "max_tokens" not in error["message"], "scores get no answer"
    assert embedder.http().post("/v2/rerank", json={**body, "max_tokens_per_doc": 100}).json()["usage"]["total_tokens"] == 102


def test_of_a_long_document_the_beginning_is_read(serve, answering):
    """The model's prompt stands there, and the clients of Cohere mean the end of a document."""
    server = serve(script=answering("", embedding_size=8, prompts=(("query", ""), ("passage", "P: "))))
    body = {"query": "a", "documents": ["abcdef"], "max_tokens_per_doc": 6}
    assert server.http().post("/v1/rerank", json=body).status_code == 200
    assert (256, *b"P: ab") in [embed.prompt_ids for embed in server.worker.embeds]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_1"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(embedder, path, body, param):
    response = embedder.http().post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param), response.text


RANKED = {"query": "a", "documents": ["b"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, RANKED) for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/invocations")),
        *((path, {"text_1": "a", "text_2": "b"}) for path in ("/score", "/v1/score")),
    ],
)
def test_a_generator_is_refused(server, path, body):
    """A reranker that is saved as a generator must not answer with cosines of its hidden states."""
    response = server.http().post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "not_an_embedding_model", "model")
    assert "model 'null' generates text; expected a reranker or a model that was trained for embeddings" in error["message"]
    assert 'set `classifier_from_token` in its config.json to ["no", "yes"]' in error["message"]
    assert "load it with `embeddings: true`" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/invocations", {"input": "a"}),
        ("/v2/embed", {"model": "null", "texts": ["a"]}),
        ("/pooling", {"input": "a"}),
        ("/pooling", {"input": "a", "task": "embed"}),
        ("/pooling", {"input": "a", "task": "token_embed"}),
        ("/api/embed", {"model": "null", "input": "a"}),
        ("/api/embeddings", {"model": "null", "prompt": "a"}),
    ],
)
def test_a_generator_gives_no_vectors(server, path, body):
    response = server.http().post(path, json=body)
    assert response.status_code == 400, response.text
    assert "model 'null' generates text and was not trained for embeddings; load it with `embeddings: true`" in response.text
    assert "not_an_embedding_model" in response.text


def test_a_model_s_description_says_how_it_scores(serve, answering, caplog):
    caplog.set_level(logging.INFO, "server.models.load_report")
    note = "rerank and score compare embeddings by their cosine"
    for fields, scoring in (
        ({"embedding_size": 8, "embedding_note": note}, "cosine"),
        ({"classes": ("relevant",), "generates": False}, "pairs"),
        ({"classes": ("a", "b"), "generates": False}, None),
        ({}, None),
    ):
        (described,) = serve(script=answering("", **fields)).http().get("/v1/models").json()["data"]
        assert described["scoring"] == scoring and described.get("embedding_note") == fields.get("embedding_note")
    assert [record.getMessage() for record in caplog.records].count(f"null: {note}") == 1


def test_unknown_fields_are_reported_wherever_they_are(embedder):
    body = {"query": "a", "documents": ["b", {"text": "c", "zip": 1}], "zap": 1}
    assert embedder.http().post("/v1/rerank", json=body).headers["x-ignored-params"] == "zap, documents[1].zip"
