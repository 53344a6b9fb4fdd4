"""The endpoints for pooling and classification, in vLLM's formats."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from server.api.pooling import MAX_VALUES
from tests.doubles.worker import NullScript

SIZE = 8
TEXTS = ["alpha", "beta"]

pytestmark = pytest.mark.parametrize(
    "shared_server", [{"script": NullScript(embedding_size=SIZE, normalize=False)}], indirect=True, ids=[""], scope="module"
)


def pooled(server, **fields):
    response = server.http().post("/pooling", json={"model": "null", "input": TEXTS, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def embedded(server, **fields):
    rows = server.http().post("/v1/embeddings", json={"input": TEXTS, **fields}).json()["data"]
    return [row["embedding"] for row in rows]


@pytest.mark.parametrize("task", [None, "embed", "encode"])
def test_a_text_has_the_vector_that_embeddings_have(server, task):
    answer = pooled(server, task=task)
    assert [row["data"] for row in answer["data"]] == embedded(server)
    assert [(row["index"], row["object"]) for row in answer["data"]] == [(0, "pooling"), (1, "pooling")]
    assert answer["object"] == "list" and answer["model"] == "null" and answer["id"].startswith("pool-") and answer["created"]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(len(text) + 1 for text in TEXTS)


def test_each_token_has_a_vector(server):
    answer = pooled(server, task="token_embed")
    for row, text, whole in zip(answer["data"], TEXTS, embedded(server), strict=True):
        assert np.shape(row["data"]) == (len(text) + 1, SIZE)
        assert row["data"][-1] == whole


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_base64_holds_the_same_values(server, task):
    for row, plain in zip(pooled(server, task=task, encoding_format="base64")["data"], pooled(server, task=task)["data"], strict=True):
        values = np.frombuffer(base64.b64decode(row["data"]), "<f4")
        assert values.tolist() == np.ravel(plain["data"]).tolist()


def test_activation_is_vllm_s_word_for_length_one(server):
    for row in pooled(server, task="token_embed", use_activation=True)["data"]:
        assert np.linalg.norm(row["data"], axis=1) == pytest.approx(1, abs=1e-6)
    assert embedded(server, use_activation=True) == embedded(server, normalize=True)


def test_a_conversation_is_pooled_as_the_template_writes_it(server):
    answer = pooled(server, input=None, messages=[{"role": "user", "content": "hi"}], task="token_embed")
    assert len(answer["data"][0]["data"]) == answer["usage"]["total_tokens"] == len("<|user|>hi")


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/pooling", {"task": "classify"}, "not_a_classifier", "model"),
        ("/pooling", {"task": "token_classify"}, "not_a_classifier", "model"),
        ("/pooling", {"task": "plugin"}, "invalid_value", "task"),
        ("/pooling", {"input": None}, "missing_field", "input"),
        ("/pooling", {"task": "token_embed", "dimensions": 2}, "invalid_value", "dimensions"),
        ("/pooling", {"task": "token_embed", "input": ["x" * 4000] * (MAX_VALUES // SIZE // 4000 + 1)}, "invalid_value", "input"),
        ("/classify", {}, "not_a_classifier", "model"),
        ("/v1/classify", {"model": "other"}, "model_not_found", "model"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, path, fields, code, param):
    response = server.http().post(path, json={"model": "null", "input": TEXTS, **fields})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param) and response.status_code in (400, 404)


def test_a_model_without_vectors_of_tokens_says_so(shared_server, serve):
    server = serve(script=NullScript(embedding_size=SIZE, embeds_tokens=False))
    response = server.http().post("/pooling", json={"input": "a", "task": "token_embed"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "task"
    assert len(server.http().post("/pooling", json={"input": "a"}).json()["data"][0]["data"]) == SIZE


def test_unknown_fields_are_reported(server):
    assert server.http().post("/pooling", json={"input": "a", "zap": 1}).headers["x-ignored-params"] == "zap"
