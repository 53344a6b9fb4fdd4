"""Golden models of two families on a software GPU, used over HTTP. Their outputs equal the reference, and bits are reproducible. Faults of
kernels lose no request, and several models share a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deploy.model_loading.load import load_model
from server.interfaces import LoadError
from server.messages import ErrorCode, Load
from tests.conftest import GOLDEN, CommandLine
from tests.deploy.gpu_server import GpuServer, copy_golden, serving, words_of
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu

pytestmark = [needs_pycuda, pytest.mark.xdist_group("GPU server")]

FIRST, SECOND = "llama", "gemma3"
CARD_BYTES = 384 << 20  # memory of the GPU, of which a worker leaves 300 MiB free
KV_BYTES = 48 << 20  # bytes of a model's KV cache; the GPU has room for two models, not for three


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    copy_golden((FIRST, SECOND), root)
    return root


@pytest.fixture(scope="module")
def server(models: Path, _library: Path, command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuServer]:
    """Yield a server with a software GPU that has loaded the model of the first family."""
    with serving(models, FIRST, _library, tmp_path_factory.mktemp("card"), command_line.environment, CARD_BYTES) as server:
        yield server


def golden(family: str) -> tuple[list[int], str]:
    """Return a prompt, and the text with which transformers continues the prompt."""
    arrays = np.load(GOLDEN / "models" / family / "golden.npz")
    return arrays["prompt"].tolist(), words_of(arrays["continuation"][:3])


def test_models_share_a_card_and_one_that_does_not_fit_beside_them_is_refused(server: GpuServer) -> None:
    """Two models share a GPU, and both continue a prompt as transformers does. Each worker plans with the memory that other models have
    left free, so a third model is refused."""
    second = server.load(SECOND, kv_cache_bytes=KV_BYTES)
    assert second.status_code == 200, second.text
    for family in (FIRST, SECOND):
        prompt, expected = golden(family)
        assert server.answer(prompt, family)["text"] == expected
        chat = {"messages": [{"role": "user", "content": " ".join(f"w{i}" for i in prompt)}], "max_tokens": 3, "temperature": 0}
        assert server.post("/v1/chat/completions", model=family, **chat)["choices"][0]["message"]["content"] == expected
        assert server.model(family)["device"] == "cuda" and server.model(family)["graphs"] > 0
    third = server.load(SECOND, name="third", kv_cache_bytes=KV_BYTES)
    assert third.status_code == 507, third.text
    error = third.json()["error"]
    assert 0 < error["free_bytes"] < error["required_bytes"] and "are free" in error["message"]


@pytest.mark.gpu
def test_answers_are_the_same_alone_beside_others_and_from_the_prefix_cache(server: GpuServer) -> None:
    """A seeded answer has the same text and the same bits of log-probabilities in three cases: when the request runs alone, when others run
    too, and when its prompt is in the prefix cache."""
    prompts = [list(range(3 + n, 22 + n)) for n in range(3)]
    alone = [server.answer(prompt, FIRST, temperature=1.0, seed=n) for n, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(server.answer, prompt, FIRST, temperature=1.0, seed=n) for n, prompt in enumerate(prompts)]
        assert [each.result() for each in together] == alone


def test_a_kernel_with_a_wild_pointer_ends_its_worker_and_no_request(server: GpuServer) -> None:
    """If a kernel gets an invalid pointer, its worker ends, and another worker continues the answer with the same bits. The error in the
    log names the GPU and contains the driver's message."""
    prompt = list(range(5, 24))
    expected = server.answer(prompt, FIRST)
    before = server.model(FIRST)["restarts"]
    server.wild.touch()
    assert server.answer(prompt, FIRST) == expected
    assert not server.wild.exists()
    assert server.model(FIRST)["restarts"] == before + 1 and server.model(FIRST)["resubmitted"] >= 1
    said = " ".join("".join(server.said).split())
    assert re.search(r"DeviceFault: GPU 0 \(software GPU[^)]*\), .*illegal memory access", said), said


def test_unloading_a_model_frees_its_memory_on_the_card(server: GpuServer) -> None:
    if server.load(SECOND, name="another", kv_cache_bytes=KV_BYTES // 4).status_code != 200:
        server.unload(SECOND)  # an earlier test has loaded it
        assert server.load(SECOND, name="another", kv_cache_bytes=KV_BYTES // 4).status_code == 200
    taken = sum(server.model("another")["bytes"].values())
    before = server.free_bytes
    server.unload("another")
    while server.free_bytes < before + taken // 2:  # the other model's worker reports every few seconds
        time.sleep(0.1)


@pytest.mark.gpu
def test_a_killed_worker_s_answer_goes_on_with_the_same_bits(server: GpuServer) -> None:
    """The worker is killed after the first tokens of a streamed answer. Another worker continues the answer."""
    asked = {
        "model": FIRST,
        "prompt": list(range(7, 26)),
        "max_tokens": 5,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 2,
        "ignore_eos": True,
    }

    def tokens(*, is_killed: bool) -> list[Any]:
        found: list[Any] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**asked, "stream": True}, timeout=300) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found += [choice["logprobs"]["token_logprobs"] for choice in json.loads(line[6:])["choices"] if choice["logprobs"]]
                if is_killed and len(found) == 2:
                    is_killed = False
                    os.kill(worker, signal.SIGKILL)
        return [number for numbers in found for number in numbers]

    for model in httpx.get(f"{server.url}/admin/models", timeout=60).json()["data"]:
        if model["id"] != FIRST:
            server.unload(model["id"])
    (worker,) = server.workers
    expected, before = tokens(is_killed=False), server.model(FIRST)["restarts"]
    assert tokens(is_killed=True) == expected and len(expected) == 5
    assert server.model(FIRST)["restarts"] == before + 1


def test_memory_that_is_gone_when_it_is_asked_for_is_an_error_of_the_load(models: Path, software_gpu: SoftwareGpu) -> None:
    """If the plan fits the given limit but the GPU has less free memory, the load fails with an error."""
    limits = {"kv_cache_bytes": 2 << 30, "memory_limit_bytes": 8 << 30}
    load = Load(FIRST, str(models / FIRST), "f32", max_context=64, max_batch=4, device="cuda", **limits)
    with pytest.raises(LoadError, match=r"on GPU 0 needs [\d,]+ bytes, [\d,]+ are free.*unload other models") as refused:
        load_model(load, lambda _stage, _fraction: None)
    assert refused.value.code is ErrorCode.INSUFFICIENT_MEMORY and refused.value.required_bytes > refused.value.free_bytes > 0
