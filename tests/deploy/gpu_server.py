"""Golden models on a software GPU behind HTTP: their folders with a tokenizer, and a server that loads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from compiler.frontend.registry import load_config
from deploy.model_loading import costs
from deploy.model_loading.load import load_model
from server.engine.scheduling.pace import Measured
from server.engine.worker import LoadedModel
from server.messages import Load
from tests.conftest import BIN, GOLDEN, ROOT, greeting, workers_of
from tests.gpu.fixtures import SoftwareGpu

MEANINGLESS_S = 0.01  # what a load takes for the time of a step; times on a software GPU are long and say nothing
TEMPLATE = "{{ messages[0]['content'] }}"  # a prompt is the words of its message


@dataclass
class GpuServer:
    url: str
    pid: int
    wild: Path  # creating this file makes the next kernel get an invalid pointer
    said: list[str]  # lines on the server's standard error since it was ready

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in httpx.get(f"{self.url}/admin/models", timeout=60).json()["data"] if m["id"] == name)

    @property
    def workers(self) -> list[int]:
        """The process ids of the workers."""
        return workers_of(self.pid)

    @property
    def free_bytes(self) -> int:
        """The free memory of the GPU, as the metrics report it."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        (line,) = (line for line in lines if line.startswith("relaxserve:device_memory_bytes{") and 'kind="free"' in line)
        return int(float(line.rpartition(" ")[2]))

    def load(self, source: str, **settings: Any) -> httpx.Response:
        body = {"source": source, "device": "cuda", "quantize": "f32", "max_context": 64, "max_batch": 4, "wait": True, **settings}
        return httpx.post(f"{self.url}/admin/models", json=body, timeout=300)

    def unload(self, name: str) -> None:
        httpx.delete(f"{self.url}/admin/models/{name}", timeout=60).raise_for_status()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}{path}", json=body, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()

    def answer(self, prompt: list[int], model: str, **more: Any) -> dict[str, Any]:
        asked = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 2, **more}
        return self.post("/v1/completions", **asked)["choices"][0]


def copy_golden(names: Sequence[str], root: Path) -> None:
    """Copy golden models to a folder. Give each a tokenizer with one token per word, and a chat template."""
    for name in names:
        folder = shutil.copytree(GOLDEN / "models" / name, root / name)
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(load_config(folder).vocab_size)}, unk_token="w0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def loaded_here(load: Load) -> LoadedModel:
    """Load a model in this process without measuring its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "measured", lambda _model: Measured({1: MEANINGLESS_S}))
        return load_model(load, lambda _stage, _fraction: None)


def words_of(tokens: Sequence[int]) -> str:
    """Return the text of generated tokens."""
    return "".join(f"w{token}" for token in tokens)


@contextmanager
def serving(
    models: Path, first: str, library: Path | None, folder: Path, environment: dict[str, str], memory: int, *, ranks: int = 1
) -> Generator[GpuServer]:
    """Start a server with software GPUs of `memory` bytes that has loaded the model `first` of the folder `models`, divided over `ranks`
    GPUs. Its loads do not measure steps."""
    card = SoftwareGpu(library).environment(
        arch="8.0", memory=memory, shared=folder, wild=folder / "wild", cards=ranks, step_s=MEANINGLESS_S
    )
    sizes = ("--quantize", "f32", "--max-context", "64", "--max-batch", "4")
    settings = ("--device", "cuda", "--tensor-parallel", str(ranks), *sizes, "--port", "0", "--stall-s", "600", "--model-root", models)
    command = [BIN / "relaxserve", "serve", models / first, *settings]
    with subprocess.Popen(command, cwd=ROOT, env={**environment, **card}, stderr=subprocess.PIPE, text=True) as process:
        said: list[str] = []
        try:
            url = greeting(process)[0]
            assert process.stderr is not None
            reader = threading.Thread(target=said.extend, args=(process.stderr,))
            reader.start()
            yield GpuServer(url, process.pid, folder / "wild", said)
        finally:
            process.terminate()
            process.wait(timeout=120)
        reader.join(60)
