"""Every Python snippet in README and docs runs twice: on a plain server, and on a server with the setting `strict` that requires a key."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import serving_demo

pytestmark = pytest.mark.xdist_group("demo server")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]
PYTHON = [text for language, text in BLOCKS if language == "python"]
CURL = [text for language, text in BLOCKS if language == "sh" and re.search(r"curl .* -d ", text, re.DOTALL)]
CLIENTS = {"openai", "anthropic", "ollama", "cohere", "langchain_openai", "litellm"}
KEY = "a-key-of-a-client"

# This program runs the snippets for all servers in one process, so each client library is imported only once. After the output of each
# snippet it prints a marker line.
RUN_ALL = """
for number, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {number}", "exec"), {})
    print("\\n<end>", flush=True)
"""


def test_every_client_has_a_snippet():
    assert set(re.findall(r"^(?:from|import) (\w+)", "".join(PYTHON), re.MULTILINE)) - {"json", "time"} == CLIENTS
    assert len(CURL) == 1


def run_all(servers: list[tuple[Any, str]]) -> list[list[str]]:
    """Run all snippets against each server with its key, and return the output of each snippet."""
    for client in CLIENTS:
        if importlib.util.find_spec(client) is None:
            pytest.skip(f"needs {client}: make .venv/clients")
    snippets = [text.replace("http://127.0.0.1:8000", server.url).replace("unused", key) for server, key in servers for text in PYTHON]
    known = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # without this, importing litellm downloads a price list
    command = f"SNIPPETS = {snippets!r}\n{RUN_ALL}"
    *told, after = servers[0][0].run(sys.executable, "-c", command, **known).split("\n<end>\n")
    assert after == "" and len(told) == len(snippets)
    found = [told[number * len(PYTHON) :][: len(PYTHON)] for number in range(len(servers))]
    for (server, key), outputs in zip(servers, found, strict=True):
        for text in CURL:
            text = text.replace("http://127.0.0.1:8000", server.url).replace(" -H ", f" -H 'Authorization: Bearer {key}' -H ", 1)
            outputs.append(server.run("bash", "-euc", text))
    return found


def test_snippets_run_with_and_without_a_key(demo_server, cache_folder):
    with serving_demo(cache_folder, "--strict", RELAXSERVE_API_KEYS=KEY) as keyed:
        plain, strict = run_all([(demo_server, "unused"), (keyed, KEY)])
        assert all(text.strip() for text in plain) and sum("Paris" in text for text in plain) >= 2
        assert len(strict) == len(plain)
        assert "401" in keyed.run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"{keyed.url}/v1/models")
