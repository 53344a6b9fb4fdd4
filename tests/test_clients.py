"""Every snippet of a client, of the README and the pages of docs, on a plain server and on one that is strict and has a key."""

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
CURL = [text for language, text in BLOCKS if language == "sh" and "curl " in text]
CLIENTS = {"openai", "anthropic", "ollama", "cohere", "langchain_openai", "litellm"}
KEY = "a-key-of-a-client"

# In one process, which imports each client once. A blank line ends what a snippet printed.
RUN_ALL = """
for number, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {number}", "exec"), {})
    print("\\n<end>", flush=True)
"""


def test_every_client_has_a_snippet():
    assert set(re.findall(r"^(?:from|import) (\w+)", "".join(PYTHON), re.MULTILINE)) - {"json"} == CLIENTS
    assert len(CURL) == 1


def run_all(server: Any, key: str) -> list[str]:
    """What each printed."""
    for client in CLIENTS:
        if importlib.util.find_spec(client) is None:
            pytest.skip(f"needs {client}: make .venv/clients")
    snippets = [text.replace("http://127.0.0.1:8000", server.url).replace("unused", key) for text in PYTHON]
    known = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the network as it is imported
    *told, after = server.run(sys.executable, "-c", f"SNIPPETS = {snippets!r}\n{RUN_ALL}", **known).split("\n<end>\n")
    assert after == ""
    for text in CURL:
        text = text.replace("http://127.0.0.1:8000", server.url).replace(" -H ", f" -H 'Authorization: Bearer {key}' -H ", 1)
        told.append(server.run("bash", "-euc", text))
    return told


def test_snippets_run_with_and_without_a_key(demo_server, cache_folder):
    plain = run_all(demo_server, "unused")
    assert all(text.strip() for text in plain) and sum("Paris" in text for text in plain) >= 2
    with serving_demo(cache_folder, "--strict", RELAXSERVE_API_KEYS=KEY) as keyed:
        assert len(run_all(keyed, KEY)) == len(plain)
        assert "401" in keyed.run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"{keyed.url}/v1/models")
