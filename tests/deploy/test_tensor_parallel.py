"""`--tensor-parallel 2`: a golden model on two software GPUs behind HTTP, and the settings and machines that are refused."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import BIN, CommandLine
from tests.deploy.gpu_server import GpuServer, copy_golden, serving
from tests.deploy.test_cuda_families import golden
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library

pytestmark = [needs_pycuda, pytest.mark.xdist_group("GPU server")]

MODEL = "llama"
CARD_BYTES = 384 << 20
ASKED: dict[str, Any] = {"model": MODEL, "prompt": list(range(7, 26)), "max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    copy_golden((MODEL, "gpt_oss"), root)
    return root


@pytest.fixture(scope="module")
def server(models: Path, _library: Path, command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuServer]:
    """Yield a server whose model is divided over two software GPUs."""
    folder = tmp_path_factory.mktemp("cards")
    with serving(models, MODEL, _library, folder, command_line.environment, CARD_BYTES, ranks=2) as server:
        yield server


def streamed(server: GpuServer, *, kills: bool = False) -> list[float]:
    """Return the log-probabilities of a streamed answer. With `kills`, kill the worker after the first tokens."""
    found: list[float] = []
    asked = {**ASKED, "stream": True, "ignore_eos": True}
    (worker,) = server.workers
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            if kills and len(found) >= 2:
                kills = False
                os.kill(worker, signal.SIGKILL)
    return found


def test_two_gpus_continue_a_prompt_as_transformers_does(server: GpuServer) -> None:
    prompt, expected = golden(MODEL)
    assert server.answer(prompt, MODEL)["text"] == expected
    described = server.model(MODEL)
    assert described["devices"] == ["cuda:0", "cuda:1"] and described["device"] == "cuda"


def test_a_killed_worker_s_answer_goes_on_with_the_same_bits(server: GpuServer) -> None:
    expected, before = streamed(server), server.model(MODEL)["restarts"]
    assert streamed(server, kills=True) == expected and len(expected) == 4
    assert server.model(MODEL)["restarts"] == before + 1


def test_a_fault_on_either_gpu_ends_the_worker_and_no_request(server: GpuServer) -> None:
    prompt = list(range(5, 24))
    expected, before = server.answer(prompt, MODEL), server.model(MODEL)["restarts"]
    server.wild.touch()
    assert server.answer(prompt, MODEL) == expected
    assert server.model(MODEL)["restarts"] == before + 1
    said = " ".join("".join(server.said).split())
    assert re.search(r"DeviceFault: GPU [01] \(software GPU[^)]*\), .*illegal memory access", said), said


def test_the_plan_says_what_each_gpu_holds(models: Path, _library: Path, command_line: CommandLine) -> None:
    environment = SoftwareGpu(_library).environment(arch="8.0", cards=2)
    sizes = ["--quantize", "f32", "--max-context", "64", "--max-batch", "4"]  # those of the server, whose program is in the cache
    command = [BIN / "relaxserve", "inspect", models / MODEL, "--device", "cuda", *sizes, "--json"]
    one, two = (json.loads(command_line.run(*command, "--tensor-parallel", count, **environment)) for count in ("1", "2"))
    assert (one["devices"], two["devices"]) == (["cuda"], ["cuda:0", "cuda:1"])
    assert two["plan"]["weights_bytes"] < 0.6 * one["plan"]["weights_bytes"]
    assert 2 * two["plan"]["page_bytes"] == one["plan"]["page_bytes"]


def test_compile_prepares_the_program_of_several_gpus(models: Path, _library: Path, command_line: CommandLine) -> None:
    environment = SoftwareGpu(_library).environment(arch="8.0", cards=2)
    sizes = ["--quantize", "f32", "--max-context", "64", "--max-batch", "4"]  # those of the server, whose program is in the cache
    command = [BIN / "relaxserve", "compile", models / MODEL, "--device", "cuda", *sizes]
    one, two = (command_line.run(*command, "--tensor-parallel", count, **environment) for count in ("1", "2"))
    assert one.split()[0] != two.split()[0], "the keys of the programs"
    assert "was in the cache" in command_line.run(*command, "--tensor-parallel", "2", **environment)


@pytest.mark.parametrize(
    ("model", "options", "card", "expected"),
    [
        (MODEL, ["--device", "cuda"], {}, "needs GPUs 0 to 1; this machine has 1, numbered from 0: lower tensor_parallel"),
        (MODEL, ["--device", "cuda:1"], {"cards": 2}, "needs GPUs 1 to 2; this machine has 2, numbered from 0: lower tensor_parallel"),
        (MODEL, ["--device", "cuda"], {"cards": 2, "peers": 0}, "GPU 0 cannot read the memory of GPU 1, which tensor_parallel needs"),
        (
            MODEL,
            [],
            {"cards": 2},
            "tensor_parallel is 2 and device is 'cpu'; expected cuda: set device to cuda, or leave tensor_parallel out",
        ),
        (MODEL, ["--device", "cuda", "--quantize", "4bit"], {"cards": 2}, "quantize is '4bit', which measures the whole model"),
        (MODEL, ["--device", "cuda", "--quantize", "int5"], {"cards": 2}, "quantize is 'int5'; expected auto"),
        ("gpt_oss", ["--device", "cuda"], {"cards": 2}, "the model is of the family gpt_oss, whose layers have no such division yet"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(
    model: str, options: list[str], card: dict[str, Any], expected: str, models: Path, _library: Path, command_line: CommandLine
) -> None:
    environment = SoftwareGpu(_library).environment(**card)
    command = [BIN / "relaxserve", "inspect", models / model, "--tensor-parallel", "2", *options]
    assert expected in " ".join(command_line.run(*command, status=1, **environment).split())
