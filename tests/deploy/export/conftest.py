from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.sources import load_of
from deploy.export.web import export_web
from deploy.model_loading.servable import Servable, require_servable, silent
from tests.node import PATIENCE_S, node

SCRIPTS = Path(__file__).parent
CONTEXT = 256


@pytest.fixture(scope="session")
def demo() -> Servable:
    return require_servable(load_of("demo", "bf16", CONTEXT, 1, None, "auto", "host"), silent)


@pytest.fixture(scope="session")
def site(demo: Servable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for the web, with relaxed SIMD alone: one compile."""
    folder = tmp_path_factory.mktemp("site")
    export_web(demo, "demo", folder, levels=["wasm-relaxed"])
    return folder


@pytest.fixture
def ask(site: Path) -> Callable[..., list[list[Any]]]:
    """Requests, in one process of Node, to their events."""

    def run(*requests: dict[str, Any]) -> list[list[Any]]:
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        command = [node(), SCRIPTS / "engine.mjs", site]
        done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr.decode()[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
