"""Golden models of two families on a software GPU, used over HTTP. Their outputs equal the reference, and bits are reproducible. Faults of
kernels lose no request, and several models share a GPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from deploy.model_loading.load import load_model
from server.interfaces import LoadError
from server.messages import ErrorCode, Load
from tests.conftest import BIN, GOLDEN, ROOT, DemoServer, greeting
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu

pytestmark = [needs_pycuda, pytest.mark.xdist_group("demo server")]

FIRST, SECOND = "llama", "gemma3"
CARD_BYTES = 384 << 20  # memory of the GPU, of which a worker leaves 300 MiB free
KV_BYTES = 48 << 20  # bytes of a model's KV cache; the GPU has room for two models, not for three


@dataclass
class GpuServer:
    url: str
    wild: Path  # creating this file makes the next kernel get an invalid pointer
    said: list[str]  # lines on the server's standard error since it was ready

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in httpx.get(f"{self.url}/admin/models", timeout=60).json()["data"] if m["id"] == name)

    def load(self, source: str, **settings: Any) -> httpx.Response:
        body = {"source": source, "device": "cuda", "quantize": "f32", "max_context": 64, "max_batch": 4, "wait": True, **settings}
        return httpx.post(f"{self.url}/admin/models", json=body, timeout=300)

    def answer(self, prompt: list[int], model: str = FIRST, **more: Any) -> dict[str, Any]:
        asked = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 2, **more}
        response = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each family. Each model has a tokenizer with one token per word."""
    root = tmp_path_factory.mktemp("models")
    for name in (FIRST, SECOND):
        shutil.copytree(GOLDEN / "models" / name, root / name)
        num_words = json.loads((root / name / "config.json").read_text())["vocab_size"]
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0")
        tokenizers.Tokenizer(words).save(str(root / name / "tokenizer.json"))
    return root


@pytest.fixture(scope="module")
def server(models: Path, _library: Path, demo_server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuServer]:
    """Yield a server with a software GPU that has loaded the model of the first family."""
    folder = tmp_path_factory.mktemp("card")
    card = SoftwareGpu(_library).environment(arch="8.0", memory=CARD_BYTES, shared=folder, wild=folder / "wild")
    settings = (
        "--device",
        "cuda",
        "--quantize",
        "f32",
        "--max-context",
        "64",
        "--max-batch",
        "4",
        "--port",
        "0",
        "--stall-s",
        "600",
        "--model-root",
        models,
    )
    environment = {**demo_server.environment, **card}
    with subprocess.Popen(
        [BIN / "relaxserve", "serve", models / FIRST, *settings], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        said: list[str] = []
        try:
            url = greeting(process)[0]
            assert process.stderr is not None
            reader = threading.Thread(target=said.extend, args=(process.stderr,))
            reader.start()
            yield GpuServer(url, folder / "wild", said)
        finally:
            process.terminate()
            process.wait(timeout=120)
        reader.join(60)


def golden(family: str) -> tuple[list[int], str]:
    """Return a prompt, and the text with which transformers continues the prompt."""
    arrays = np.load(GOLDEN / "models" / family / "golden.npz")
    return arrays["prompt"].tolist(), "".join(f"w{i}" for i in arrays["continuation"][:3])


def test_models_share_a_card_and_one_that_does_not_fit_beside_them_is_refused(server: GpuServer) -> None:
    """Two models share a GPU, and both continue a prompt as transformers does. Each worker plans with the memory that other models have
    left free, so a third model is refused."""
    second = server.load(SECOND, kv_cache_bytes=KV_BYTES)
    assert second.status_code == 200, second.text
    for family in (FIRST, SECOND):
        prompt, expected = golden(family)
        assert server.answer(prompt, family)["text"] == expected
        assert server.model(family)["device"] == "cuda" and server.model(family)["graphs"] > 0
    third = server.load(SECOND, name="third", kv_cache_bytes=KV_BYTES)
    assert third.status_code == 507, third.text
    error = third.json()["error"]
    assert 0 < error["free_bytes"] < error["required_bytes"] and "are free" in error["message"]


def test_answers_are_the_same_alone_beside_others_and_from_the_prefix_cache(server: GpuServer) -> None:
    """A seeded answer has the same text and the same bits of log-probabilities in three cases: when the request runs alone, when others run
    too, and when its prompt is in the prefix cache."""
    prompts = [list(range(3 + n, 22 + n)) for n in range(3)]
    alone = [server.answer(prompt, temperature=1.0, seed=n) for n, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(server.answer, prompt, temperature=1.0, seed=n) for n, prompt in enumerate(prompts)]
        assert [each.result() for each in together] == alone


def test_a_kernel_with_a_wild_pointer_ends_its_worker_and_no_request(server: GpuServer) -> None:
    """If a kernel gets an invalid pointer, its worker ends, and another worker continues the answer with the same bits. The error in the
    log names the GPU and contains the driver's message."""
    prompt = list(range(5, 24))
    expected = server.answer(prompt)
    before = server.model(FIRST)["restarts"]
    server.wild.touch()
    assert server.answer(prompt) == expected
    assert not server.wild.exists()
    assert server.model(FIRST)["restarts"] == before + 1 and server.model(FIRST)["resubmitted"] >= 1
    said = " ".join("".join(server.said).split())
    assert re.search(r"DeviceFault: GPU 0 \(software GPU[^)]*\), .*illegal memory access", said), said


def test_memory_that_is_gone_when_it_is_asked_for_is_an_error_of_the_load(models: Path, software_gpu: SoftwareGpu) -> None:
    """If the plan fits the given limit but the GPU has less free memory, the load fails with an error."""
    limits = {"kv_cache_bytes": 2 << 30, "memory_limit_bytes": 8 << 30}
    load = Load(FIRST, str(models / FIRST), "f32", max_context=64, max_batch=4, device="cuda", **limits)
    with pytest.raises(LoadError, match=r"on GPU 0 needs [\d,]+ bytes, [\d,]+ are free.*unload other models") as refused:
        load_model(load, lambda _stage, _fraction: None)
    assert refused.value.code is ErrorCode.INSUFFICIENT_MEMORY and refused.value.required_bytes > refused.value.free_bytes > 0
