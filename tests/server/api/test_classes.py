"""The endpoints that return class scores: classification of texts, and reranking with a model that scores (query, document) pairs."""

from __future__ import annotations

import struct
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from compiler.frontend.reranker import QWEN3
from server.api.rerank import _prompted
from server.scoring import ClassScores, PairPrompt
from server.text.tokenizer import Tokenizer
from tests.doubles.worker import NullScript, _vector

NAMES = ("low", "middle", "high")
TEXTS = ["alpha", "beta"]
SEPARATOR = 0  # token that the null tokenizer puts between the two texts of a pair


@pytest.fixture
def classifier(serve):
    return serve(script=NullScript(classes=NAMES, generates=False))


@pytest.fixture
def reranker(serve):
    return serve(script=NullScript(classes=("LABEL_0",), class_scores=ClassScores.SIGMOID, generates=False))


@pytest.mark.parametrize(("path", "fields"), [("/classify", {}), ("/pooling", {}), ("/pooling", {"task": "classify"})])
def test_scores_of_classes_have_no_dimensions(classifier, path, fields):
    """A part of them would be the scores of some classes."""
    refused = classifier.http().post(path, json={"input": TEXTS, "dimensions": 2, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"


def numbers(ids, count):
    return np.array(struct.unpack(f"<{count}f", _vector(sum(ids), count, normalize=False)))


def text_ids(server, text):
    return server.http().post("/tokenize", json={"prompt": text}).json()["tokens"]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_a_text_has_the_class_of_the_largest_number(classifier, path):
    answer = classifier.http().post(path, json={"model": "null", "input": TEXTS}).json()
    for row, text in zip(answer["data"], TEXTS, strict=True):
        found = numbers(text_ids(classifier, text), 3)
        shares = np.exp(found) / np.exp(found).sum()
        assert row["probs"] == pytest.approx(list(shares), abs=1e-6)
        assert (row["label"], row["num_classes"]) == (NAMES[int(found.argmax())], 3)
    assert [row["index"] for row in answer["data"]] == [0, 1]
    assert answer["object"] == "list" and answer["model"] == "null" and answer["id"].startswith("classify-")
    assert answer["usage"]["total_tokens"] == sum(len(text_ids(classifier, text)) for text in TEXTS)


@pytest.mark.parametrize("field", ["use_activation", "activation"])
def test_the_numbers_themselves_where_a_request_asks_for_them(classifier, field):
    (row,) = classifier.http().post("/classify", json={"input": "alpha", field: False}).json()["data"]
    assert row["probs"] == list(numbers(text_ids(classifier, "alpha"), 3))


@pytest.mark.parametrize("task", [None, "classify", "score"])
def test_pooling_gives_the_scores_of_classes(classifier, task):
    rows = classifier.http().post("/pooling", json={"input": TEXTS, "task": task}).json()["data"]
    classes = classifier.http().post("/classify", json={"input": TEXTS}).json()["data"]
    assert [row["data"] for row in rows] == [row["probs"] for row in classes]


@pytest.mark.parametrize("task", [None, "classify", "score"])
def test_pooling_gives_the_numbers_themselves_where_a_request_asks_for_them(classifier, task):
    (row,) = classifier.http().post("/pooling", json={"input": "alpha", "task": task, "use_activation": False}).json()["data"]
    assert row["data"] == list(numbers(text_ids(classifier, "alpha"), 3))


def test_scores_of_any_class_need_not_sum_to_one(serve):
    server = serve(script=NullScript(classes=NAMES, class_scores=ClassScores.SIGMOID, generates=False))
    (row,) = server.http().post("/classify", json={"input": "alpha"}).json()["data"]
    assert row["probs"] == pytest.approx(list(1 / (1 + np.exp(-numbers(text_ids(server, "alpha"), 3)))), abs=1e-6)


def score(query, document):
    (found,) = numbers([*query.encode(), SEPARATOR, *document.encode()], 1)
    return 1 / (1 + np.exp(-found))


def test_a_reranker_reads_pairs(reranker):
    documents = ["alpha", "beta", "gamma"]
    answer = reranker.http().post("/rerank", json={"query": "a", "documents": documents}).json()
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(score("a", documents[result["index"]]), abs=1e-6)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] == sum(len("a") + 1 + len(document) for document in documents)
    scored = reranker.http().post("/score", json={"text_1": ["a", "b"], "text_2": ["alpha", "beta"]}).json()
    assert answer["scoring"] == scored["scoring"] == "pairs"
    pairs = scored["data"]
    assert [row["score"] for row in pairs] == pytest.approx([score("a", "alpha"), score("b", "beta")], abs=1e-6)


def test_of_a_pair_that_is_cut_the_query_stays(reranker):
    body = {"text_1": "abc", "text_2": "x" * 9000}
    error = reranker.http().post("/score", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "text_2")
    assert "max_tokens" not in error["message"], "scores get no answer"
    assert reranker.http().post("/score", json={**body, "truncate_prompt_tokens": -1}).json()["usage"]["total_tokens"] == 4096
    cut = reranker.http().post("/score", json={**body, "truncate_prompt_tokens": 10}).json()
    assert cut["usage"]["total_tokens"] == 10
    assert cut["data"][0]["score"] == pytest.approx(score("abc", "x" * 6), abs=1e-6)
    error = reranker.http().post("/score", json={**body, "truncate_prompt_tokens": 1}).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "truncate_prompt_tokens is 1; expected at least 2" in error["message"]


def test_a_model_that_judges_reads_pairs_in_its_prompt(serve, reranker):
    prompt = PairPrompt("<s>", ("I:", "|Q:", "|D:"), "</s>", "find")
    judge = serve(script=NullScript(classes=("relevant",), class_scores=ClassScores.SIGMOID, generates=False, pair_prompt=prompt))

    def judged(text):
        (found,) = numbers(text.encode(), 1)
        return pytest.approx(1 / (1 + np.exp(-found)), abs=1e-6)

    rows = judge.http().post("/score", json={"text_1": "a", "text_2": ["alpha", "beta"]}).json()["data"]
    assert [row["score"] for row in rows] == [judged(f"<s>I:find|Q:a|D:{text}</s>") for text in ("alpha", "beta")]
    body = {"query": "a", "documents": ["alpha"], "instruction": "rank"}
    assert judge.http().post("/rerank", json=body).json()["results"][0]["relevance_score"] == judged("<s>I:rank|Q:a|D:alpha</s>")
    cut = judge.http().post("/score", json={"text_1": "a", "text_2": "x" * 9000, "truncate_prompt_tokens": 25}).json()
    assert cut["usage"]["total_tokens"] == 25 and cut["data"][0]["score"] == judged("<s>I:find|Q:a|D:xxxxx</s>")
    cut = judge.http().post("/score", json={"text_1": "abc", "text_2": "x", "truncate_prompt_tokens": 17}).json()
    assert cut["data"][0]["score"] == judged("<s>I:find|Q:a</s>")
    body_too_short = {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 16}
    error = judge.http().post("/score", json=body_too_short).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
    assert error["message"].startswith("truncate_prompt_tokens is 16; expected at least 17, because the model's prompt takes 16 tokens")
    long = {**body, "instruction": "rank all", "truncate_prompt_tokens": 17}
    assert "expected at least 21" in judge.http().post("/rerank", json=long).json()["error"]["message"]
    error = judge.http().post("/score", json={"text_1": "a", "text_2": "x" * 4090}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "text_2")
    error = reranker.http().post("/rerank", json=body).json()["error"]
    assert error["param"] == "instruction" and "reads none with its texts" in error["message"]


@pytest.mark.parametrize("instruction", [None, "Judge the <|im_end|>\n answer"])
def test_pairs_have_the_tokens_that_qwen3_reranker_documents(instruction):
    """The model card encodes the text around a pair apart from the pair, and joins the tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({**{letter: number for number, letter in enumerate(alphabet)}, "ĊĊ": 256, ">Ċ": 257}, [("Ċ", "Ċ"), (">", "Ċ")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    told = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    pairs = [("What is the capital?", "\n\nThe capital is Beijing.\n"), ("", "<think>"), ("ü\n", "日本")]
    texts = [f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    expected = [[*tokenizer.encode(prefix).ids, *tokenizer.encode(text).ids, *tokenizer.encode(suffix).ids] for text in texts]
    loaded: Any = SimpleNamespace(
        tokenizer=Tokenizer({"tokenizer.json": tokenizer.to_str().encode()}),
        ready=SimpleNamespace(max_context=4096, num_pages=0, page_size=16),
    )
    found = _prompted(pairs, PairPrompt(**asdict(QWEN3)), instruction, loaded, None, "documents")
    assert [pair.ids for pair in found] == expected
    assert expected[0][-1] == 256 and 258 in expected[0]


def test_what_a_model_cannot_do_is_refused_by_name(classifier, serve):
    error = classifier.http().post("/rerank", json={"query": "a", "documents": ["b"]}).json()["error"]
    assert error["code"] == "not_a_classifier" and "has 3 classes (low, middle, high)" in error["message"]
    error = classifier.http().post("/v1/embeddings", json={"input": "a"}).json()["error"]
    assert error["code"] == "not_an_embedding_model" and "ask /classify" in error["message"]
    embedder = serve(script=NullScript(embedding_size=8, generates=False))
    error = embedder.http().post("/classify", json={"input": "a"}).json()["error"]
    assert (error["code"], error["param"]) == ("not_a_classifier", "model")


@pytest.mark.parametrize(("field", "value"), [("truncation_side", "left"), ("add_special_tokens", False)])
def test_a_reranker_refuses_what_it_cannot_do_with_pairs(reranker, field, value):
    for path, texts in (("/rerank", {"query": "a", "documents": ["b"]}), ("/score", {"text_1": "a", "text_2": "b"})):
        error = reranker.http().post(path, json={**texts, "truncate_prompt_tokens": 5, field: value}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", field)
    for usual in ({"truncation_side": "right", "add_special_tokens": True}, {"truncation_side": "left"}):
        assert reranker.http().post("/rerank", json={"query": "a", "documents": ["b"], **usual}).status_code == 200
