"""Models give the same bits on the CPU and on a fake device whose memory the host cannot access."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy import demo
from deploy.model_loading.load import load_model
from runtime.device.registry import DEVICES
from server.engine.worker import LoadedModel, engine_of
from server.messages import Embed, Embedding, FromWorker, Load, SamplingParams, Submit, TokenEvent, Tokens
from tests.conftest import BIN, ROOT, DemoServer, greeting
from tests.runtime.device.opaque import OpaqueDevice, OpaqueTensor

OPAQUE = "tests.runtime.device.opaque"
GOLDEN = Path(__file__).parents[1] / "golden" / "models"
PROMPT = tuple(range(40, 75))  # more tokens than two pages hold

SUBMITS = [
    Submit("greedy", PROMPT, SamplingParams(20, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)),
    # The three choices share the prompt's last page, so each choice copies the page before it writes.
    Submit("drawn", PROMPT[:17], SamplingParams(20, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True), num_choices=3),
    Submit("penalised", PROMPT[5:], SamplingParams(20, temperature=1.2, repetition_penalty=1.3, top_k=30, seed=8, logprobs=0)),
    Submit("again", PROMPT, SamplingParams(5, temperature=0.0, ignore_eos=True)),  # the prompt is already in the prefix cache
]


@contextmanager
def opaque() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for arch in DEVICES:
            patch.setitem(DEVICES, arch, OPAQUE)
        yield


def load(source: Path, **settings: Any) -> LoadedModel:
    return load_model(Load("m", str(source), **settings), lambda _stage, _fraction: None)


def answers(loaded: LoadedModel) -> tuple[dict[tuple[str, int], list[TokenEvent]], dict[str, bytes]]:
    """Return the token events of each choice and the embedding of each text."""
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    vectors: dict[str, bytes] = {}

    def hear(message: FromWorker) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            events.setdefault((event.request_id, event.choice), []).append(event)
        if isinstance(message, Embedding):
            vectors[message.request_id] = message.vector

    engine = engine_of(loaded, hear, None)
    if loaded.ready.generates:
        for submit in SUBMITS[:-1]:
            engine.submit(submit)
    for length in (1, 16, 35):
        engine.embed(Embed(str(length), tuple(token % 32 for token in PROMPT[:length])))
    while engine.has_work:
        engine.step()
    if loaded.ready.generates:
        engine.submit(SUBMITS[-1])
    while engine.has_work:
        engine.step()
    engine.close()
    return events, vectors


@pytest.mark.parametrize(("quantize", "cached"), [("bf16", True), ("int4-32", False)])
def test_the_demo_model_answers_with_the_same_bits(quantize: str, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both devices the demo model gives the same tokens, log-probabilities and embeddings. The weights are in a mapped file in one case,
    in device memory in the other."""
    if not cached:
        monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")
    settings = {"quantize": quantize, "max_batch": 8, "kv_cache_bytes": 4 << 20}
    expected = answers(load(demo.MODEL, **settings))
    with opaque():
        loaded = load(demo.MODEL, **settings)
    assert loaded.step_model is not None
    session = loaded.step_model._session  # type: ignore[attr-defined]
    assert isinstance(session.device, OpaqueDevice)
    assert all(isinstance(value, OpaqueTensor) for value in session._machine.functions["both"]._weights)
    found = answers(loaded)
    assert found == expected
    assert len(found[0]) == 6 and len(found[1]) == 3 and all(sum(len(e.token_ids) for e in events) > 0 for events in found[0].values())


@pytest.mark.parametrize("case", ["bert", "qwen3-embedding"])
def test_embedding_models_give_the_same_bits(case: str, tmp_path: Path) -> None:
    """Two embedding models, an encoder and a decoder without an output head, give the same embeddings on both devices."""
    folder = tmp_path / case
    shutil.copytree(GOLDEN / case, folder)
    if not (folder / "tokenizer.json").exists():
        shutil.copy(demo.MODEL / "tokenizer.json", folder)
    expected = answers(load(folder, quantize="f32", max_batch=8))
    with opaque():
        found = answers(load(folder, quantize="f32", max_batch=8))
    assert found == expected and len(found[1]) == 3


# --- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opaque_server(demo_server: DemoServer) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.e2e.opaque", "serve", "--port", "0", "--default-kv-cache-bytes", "16M"]
    environment = {**demo_server.environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            url, banner = greeting(server)
            assert "a worker on the opaque device" in banner, banner
            yield url
        finally:
            server.terminate()
            server.communicate(timeout=60)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 24, "seed": 3, "logprobs": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "n": 3, "seed": 4, "temperature": 1.3}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "A city as JSON"}],
            "max_tokens": 40,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        },
    ),
    ("/v1/completions", {"prompt": "The river", "max_tokens": 30, "temperature": 0, "logprobs": 2, "echo": True}),
    ("/v1/embeddings", {"input": ["one text", "another, longer text"]}),
]


@pytest.mark.xdist_group("demo server")
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=["chat", "choices", "schema", "completion", "embeddings"])
def test_a_server_on_it_answers_alike(demo_server: DemoServer, opaque_server: str, path: str, body: dict[str, Any]) -> None:
    expected, found = (_answer(url + path, body) for url in (demo_server.url, opaque_server))
    assert found == expected


def _answer(url: str, body: dict[str, Any]) -> Any:
    """Return an answer without the fields that change when a request is repeated."""
    response = httpx.post(url, json={"model": "demo", **body}, timeout=120)
    assert response.status_code == 200, response.text
    answer = json.loads(response.text)
    return {name: value for name, value in answer.items() if name not in ("id", "created")}
