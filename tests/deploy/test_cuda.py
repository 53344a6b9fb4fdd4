"""A model on a GPU, used over HTTP. Only the GPU is simulated; server, worker and compiled code are real."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import BIN, ROOT, CommandLine, DemoServer, greeting
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library

pytestmark = [needs_pycuda, pytest.mark.xdist_group("GPU server")]

QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 2,  # the prefill step gives the first token, a decoding step the second
}
SMALL = ("--max-context", "64", "--max-batch", "1")


@pytest.fixture(scope="module")
def url(_library: Path, command_line: CommandLine) -> Iterator[str]:
    """Yield the address of a server that runs the demo model on the software GPU."""
    environment = {**command_line.environment, **SoftwareGpu(_library).environment(arch="9.0", memory=1 << 30)}
    command = [
        BIN / "relaxserve",
        "serve",
        "demo",
        "--device",
        "cuda",
        *SMALL,
        "--port",
        "0",
        "--stall-s",
        "600",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield greeting(server)[0]
        finally:
            server.terminate()
            server.communicate(timeout=120)


def answer(url: str, **more: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json={**QUESTION, **more}, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.gpu
def test_a_chat_completion_is_that_of_the_cpu(url: str, demo_server: DemoServer) -> None:
    """With temperature 0, GPU and CPU give the same text. Their log-probabilities differ at most by the rounding of bf16."""
    on_gpu, on_cpu = (answer(each, logprobs=True, top_logprobs=2) for each in (url, demo_server.url))
    assert on_gpu["message"]["content"] == on_cpu["message"]["content"] == "The capital"
    for found, expected in zip(on_gpu["logprobs"]["content"], on_cpu["logprobs"]["content"], strict=True):
        assert found["token"] == expected["token"]
        assert abs(found["logprob"] - expected["logprob"]) < 0.01
        assert [top["token"] for top in found["top_logprobs"]] == [top["token"] for top in expected["top_logprobs"]]


def test_the_administration_says_what_runs_a_model(url: str) -> None:
    (model,) = httpx.get(f"{url}/admin/models", timeout=60).json()["data"]
    assert model["device"] == "cuda" and model["bytes"]["weights"] > 0 and model["graphs"] > 0


def test_the_metrics_tell_the_memory_and_the_work_of_the_card(url: str) -> None:
    """The first report comes with the load. Later reports come every few seconds, also while nothing runs."""

    def metrics() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("relaxserve:device_"))}

    def of_model(name: str) -> str:
        return f'relaxserve:device_{name}{{engine="0",model_name="demo"}}'

    (model,) = httpx.get(f"{url}/admin/models", timeout=60).json()["data"]
    before = metrics()
    memory = {kind: name for name in before for kind in ("total", "free") if f'{{device="cuda:0",kind="{kind}",name="software GPU' in name}
    total, free = memory["total"], memory["free"]
    assert before[total] == 1 << 30 and 0 < before[free] < before[total] - model["bytes"]["weights"], before
    assert before[of_model("graphs")] == model["graphs"]
    assert before[of_model("uploaded_bytes_total")] > model["bytes"]["weights"]
    launched, busy = of_model("graph_launches_total"), of_model("busy_seconds_total")
    answer(url)
    until_s = time.monotonic() + 60
    while (after := metrics())[launched] == before[launched]:
        assert time.monotonic() < until_s, "no report came"
        time.sleep(0.1)
    assert after[busy] > before[busy]


def test_a_load_that_does_not_fit_the_card_is_refused(_library: Path, command_line: CommandLine) -> None:
    """If a model does not fit into GPU memory, its memory plan says so, and the load is refused before anything is copied to the GPU."""
    environment = SoftwareGpu(_library).environment(arch="9.0", memory=16 << 20)
    said = command_line.run(BIN / "relaxserve", "generate", "demo", "-p", "x", "--device", "cuda", *SMALL[:2], status=1, **environment)
    assert re.search(r"the model takes [\d.,]+ MiB: .*of KV cache; [\d.,]+ (?:[KMG]i)?B are free", " ".join(said.split()))


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda:1", {}, "there is no GPU 1; this machine has 1, numbered from 0"),
        ("cuda", {"driver": 11080}, "the driver is for CUDA 11.8; expected 12.4 or newer"),
        ("cuda", {"arch": "7.5"}, "compute capability 7.5 cannot run target 'host'; it can run no target; the lowest one is sm_80"),
    ],
)
def test_a_card_that_cannot_serve_is_refused_with_the_reason(
    device: str, settings: dict[str, Any], expected: str, _library: Path, command_line: CommandLine
) -> None:
    environment = SoftwareGpu(_library).environment(**settings)
    said = command_line.run(BIN / "relaxserve", "inspect", "demo", "--device", device, status=1, **environment)
    assert expected in " ".join(said.split())


def test_a_device_that_does_not_exist_is_refused(command_line: CommandLine) -> None:
    said = command_line.run(BIN / "relaxserve", "inspect", "demo", "--device", "tpu", status=2)
    assert "device is 'tpu'; expected cpu, cuda" in " ".join(said.replace("│", " ").split())


def test_the_doctor_shows_the_cards(_library: Path, command_line: CommandLine) -> None:
    said = command_line.run(BIN / "relaxserve", "doctor", "--json", **SoftwareGpu(_library).environment(arch="8.0", cards=2))
    found = json.loads(said)
    assert len(found["gpus"]) == 2 and not found["gpu_problem"]
    assert re.search(r"1\.00 GiB at 3,352 GB/s, compute capability 8\.0, driver for CUDA 13\.0", found["gpus"][1]), found["gpus"]


def test_the_doctor_says_why_a_card_is_too_old(_library: Path, command_line: CommandLine) -> None:
    said = command_line.run(BIN / "relaxserve", "doctor", "--json", **SoftwareGpu(_library).environment(arch="7.5"))
    found = json.loads(said)
    assert (
        len(found["gpus"]) == 1
        and "compute capability 7.5 cannot run target 'host'; it can run no target; the lowest one is sm_80" in found["gpu_problem"]
    )
