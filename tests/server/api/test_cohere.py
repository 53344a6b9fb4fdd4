"""Cohere's embed endpoint, used through its official client."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.doubles.worker import NullScript

SIZE = 8
PROMPTS = (("query", "Find: "), ("passage", ""))
pytestmark = pytest.mark.parametrize(
    "shared_server", [{"script": NullScript(embedding_size=SIZE)}], indirect=True, ids=[""], scope="module"
)


def embed(server, **fields):
    return server.http().post("/v2/embed", json={"model": "null", "texts": ["a", "b"], "input_type": "search_document", **fields})


def test_vectors_in_both_forms_are_those_of_embeddings(server):
    answer = embed(server, embedding_types=["float", "base64"]).json()
    rows = server.http().post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
    assert answer["embeddings"]["float"] == [row["embedding"] for row in rows]
    decoded = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in answer["embeddings"]["base64"]]
    assert decoded == answer["embeddings"]["float"]
    assert answer["texts"] == ["a", "b"] and answer["id"] and answer["meta"]["billed_units"]["input_tokens"] == 4
    assert embed(server).json()["embeddings"].keys() == {"float"}
    assert len(embed(server, output_dimension=3).json()["embeddings"]["float"][0]) == 3


def test_long_texts_are_cut_unless_the_request_says_no(server):
    long = ["x" * 9000]
    for truncate in ({}, {"truncate": "START"}, {"truncate": "END"}):
        assert embed(server, texts=long, **truncate).json()["meta"]["billed_units"]["input_tokens"] == 4096
    assert embed(server, texts=long, truncate="NONE").json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"truncate": "x"}, "truncate"),
        ({"output_dimension": SIZE + 1}, "output_dimension"),
        ({"texts": ["x" * 9000], "truncate": "NONE"}, "texts"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, fields, param):
    response = embed(server, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
