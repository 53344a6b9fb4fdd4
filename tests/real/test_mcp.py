"""A real model uses the tools of an MCP server, from `relaxserve chat` to the process of the server and back."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import BIN, ROOT

pytestmark = pytest.mark.slow


def test_qwen_coder_uses_a_tool(serve_real: Callable[[str], Any]) -> None:
    url = str(serve_real("qwen2.5-coder-1.5b").http.base_url)
    server = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.doubles.mcp_server", "modern", "add"])
    question = "Use the tool add to compute 1234 plus 4321."
    words = ["chat", question, "--mcp", server, "--yes", "--temperature", "0", "--max-tokens", "200", "--url", url]
    done = subprocess.run([BIN / "relaxserve", *words], capture_output=True, text=True, timeout=600, check=True)
    assert "env: add" in done.stderr and "5555" in done.stderr, done.stderr  # what the model makes of the result is its own affair
