"""Check what a load reports: its lines in the log, and the summary of a model in the line of a start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from server.models.load_report import LOADS, summary
from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer
from tests.server.conftest import with_answer

CLASSES = {"classes": ("good", "bad"), "generates": False}
VECTORS = {"embedding_size": 8, "generates": False}


@pytest.mark.parametrize(
    ("fields", "chats", "said"),
    [
        ({}, True, "null (0 B in memory, context 4,096)"),
        ({}, False, "null (no chat template: completions only, 0 B in memory, context 4,096)"),
        (VECTORS, True, "null (embeddings, 0 B in memory, context 4,096)"),
        (CLASSES, True, "null (classes, 0 B in memory, context 4,096)"),
    ],
)
def test_a_summary_says_what_a_model_answers(serve: Any, fields: dict[str, Any], chats: bool, said: str) -> None:
    server = serve(script=with_answer("", **fields), tokenizer=ByteTokenizer(chat=chats))
    assert [summary(model) for model in server.registry.models()] == [said]


def test_the_log_names_a_load_and_its_end(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOADS):
        serve(initial=(ModelSpec("null", "null", quantize="f32"),), weigh=lambda _spec: 1 << 18)
    said = [record.getMessage() for record in caplog.records if record.name == LOADS]
    assert said[0] == "loading null from null" and said[1].startswith("null is ready after ")
    assert "null: its weights take 1.0 MiB as f32; auto keeps the numbers of its files, about 256.0 KiB" in said


@pytest.mark.parametrize(("device", "least", "said"), [("cpu", 20, "KV cache up to 3 B"), ("cuda", 23, "KV cache 3 B")])
def test_a_cache_grows_on_a_cpu_alone(serve: Any, caplog: pytest.LogCaptureFixture, device: str, least: int, said: str) -> None:
    ready = with_answer("", weights_bytes=20, arena_bytes=0, kv_cache_bytes=3)
    with caplog.at_level(logging.INFO, LOADS):
        server = serve(initial=(ModelSpec("null", "null", device=device),), script=ready)
    (model,) = server.registry.models()
    assert (model.memory["planned_bytes"], model.memory["bound_bytes"]) == (least, 23)
    assert any(said in record.getMessage() for record in caplog.records if record.name == LOADS)


def test_the_log_names_parts_of_the_checkpoint_that_are_left_out(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOADS):
        serve(script=with_answer("", left_out=("talker", "token2wav")))
    said = [record.getMessage() for record in caplog.records if record.name == LOADS]
    assert "null: talker and token2wav of its checkpoint are left out: answers are text only" in said
