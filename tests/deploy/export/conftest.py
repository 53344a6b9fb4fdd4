from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compiler.machine.products import product_tiles
from compiler.machine.target import NAMED, host
from deploy.cli.sources import load_of
from deploy.export.c import c_target, export_c
from deploy.export.web import export_web
from deploy.model_loading.known import begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from tests.node import PATIENCE_S, node

SCRIPTS = Path(__file__).parent
CONTEXT = 256
# The best target of this machine that does not use instructions for products of bf16, because these instructions round and add in another
# way than exports do.
NATIVE = next(t for t in (host(), *reversed(NAMED.values())) if t.can_run_here and product_tiles(t).pairs is None)


@pytest.fixture(scope="session")
def demo() -> Servable:
    load = load_of("demo", quantize="bf16", max_context=CONTEXT, max_batch=1, target=NATIVE.name)
    return advance(begin(msgspec.structs.replace(load, embeddings=True)), Servable)


@pytest.fixture(scope="session")
def site(demo: Servable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a web export of the demo model. The export has code for relaxed SIMD only, so the model is compiled only
    once."""
    folder = tmp_path_factory.mktemp("site")
    export_web(demo, "demo", folder, levels=["wasm-relaxed"])
    return folder


@pytest.fixture(scope="session")
def library(demo: Servable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo as a C library for x86-64-v3. The target does not depend on the machine that runs the tests."""
    folder = tmp_path_factory.mktemp("library")
    export_c(demo, "demo", c_target("x86-64-v3"), folder, shared=True)
    return folder


@pytest.fixture
def ask(site: Path) -> Callable[..., list[list[Any]]]:
    """Return a function that sends requests to the export's JavaScript client, and returns the events of each request."""
    return lambda *requests: asked(site, *requests)


def asked(site: Path, *requests: dict[str, Any]) -> list[list[Any]]:
    """Send requests to an export's JavaScript client in one Node process, and return the events of each request."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    command = [node(), SCRIPTS / "engine.mjs", site]
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
