"""Golden models of all families on a software GPU, used over HTTP. They continue chats, and embed texts, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.compiler.frontend.test_encoders import CASES as ENCODERS
from tests.compiler.frontend.test_encoders import relative_error, texts_of
from tests.compiler.frontend.test_models import NAMES
from tests.conftest import GOLDEN, CommandLine
from tests.deploy.gpu_server import GpuServer, copy_golden, serving, words_of
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("GPU server")]

FIRST = "llama"
EMBEDDING = [*ENCODERS, "qwen3-embedding"]
CARD_BYTES = 1 << 30
CONTEXT = 128  # that of the golden logits: dynamic scaling of positions depends on the longest context
KV_BYTES = 16 << 20


@pytest.fixture(scope="module")
def server(_library: Path, command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuServer]:
    models = tmp_path_factory.mktemp("models")
    copy_golden([*NAMES, *EMBEDDING], models)
    with serving(models, FIRST, _library, tmp_path_factory.mktemp("card"), command_line.environment, CARD_BYTES) as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_completion_continues_as_transformers_does(name: str, server: GpuServer) -> None:
    """The first token comes from prefill, the second from a decoding step."""
    golden = np.load(GOLDEN / "models" / name / "golden.npz")
    loaded = server.load(name, name="tested", max_batch=1, max_context=CONTEXT, kv_cache_bytes=KV_BYTES)
    assert loaded.status_code == 200, loaded.text
    try:
        assert server.model("tested")["device"] == "cuda" and server.model("tested")["graphs"] > 0
        content = " ".join(f"w{token}" for token in golden["prompt"])
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", model="tested", **asked)
        assert answer["usage"]["prompt_tokens"] == len(golden["prompt"])
        assert answer["choices"][0]["message"]["content"] == words_of(golden["continuation"][:2])
    finally:
        server.unload("tested")


@pytest.mark.parametrize("name", EMBEDDING)
def test_embeddings_are_those_of_transformers(name: str, server: GpuServer) -> None:
    golden = np.load(GOLDEN / "models" / name / "golden.npz")
    loaded = server.load(name, name="tested", max_batch=8, kv_cache_bytes=KV_BYTES)
    assert loaded.status_code == 200, loaded.text
    try:
        found = server.post("/v1/embeddings", model="tested", input=[text.tolist() for text in texts_of(golden)])["data"]
        assert relative_error(np.array([each["embedding"] for each in found]), golden["embeddings"]) < 2e-4
    finally:
        server.unload("tested")
