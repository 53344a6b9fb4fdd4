"""The examples of Ollama's Python and JavaScript clients, run as their authors publish them: each ends well, or for the reason that is named
here.

The models that they name are aliases of one that computes nothing: it thinks, calls the tool that it is shown, and answers. Of a program,
only the address of the server is replaced.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.messages import Submit
from server.models.state import ModelSpec
from tests.conftest import ROOT
from tests.doubles.worker import ByteTokenizer, NullScript
from tests.node import node
from tests.server.api.vendors.double import ThinkingTemplate

PROGRAMS = json.loads((ROOT / "tests" / "golden" / "vendors" / "ollama_examples.json").read_text())
PYTHON, JAVASCRIPT = (PROGRAMS[language]["programs"] for language in ("python", "javascript"))
PACKAGES = ROOT / ".venv" / "npm" / "node_modules"  # where the Makefile installs packages of npm
DEFAULT = "http://127.0.0.1:11434"
ADDRESS = re.compile(rf"{re.escape(DEFAULT)}|http://localhost:11434")
MODELS = ("gemma4", "gemma3", "llama3.1", "llama3.1:8b", "llama3.2", "qwen3", "mistral", "deepseek-r1", "gpt-oss:20b", "gpt-oss")
CODERS = ("codellama:7b-code", "deepseek-coder-v2")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SAID = "Rayleigh scattering."
FRIENDS = '{"friends": [{"name": "Ollama", "age": 22, "is_available": false}]}'
CALLS = {
    **dict.fromkeys(("add_two_numbers", "addTwoNumbers"), {"a": 3, "b": 1}),
    **dict.fromkeys(("get_temperature", "getTemperature", "get_weather"), {"city": "Paris"}),
    "get_flight_times": {"departure": "LGA", "arrival": "LAX"},
}


def answer(submit: Submit, _choice: int) -> list[list[int]]:
    """Call a tool that the prompt shows and that has not answered yet, write JSON if a format is demanded, or else say something."""
    prompt = bytes(each for each in submit.prompt_ids if each < 256).decode()
    tool = next((name for name in CALLS if f'"{name}"' in prompt.partition("\n")[0]), None)
    if tool is not None and "<|tool|>" not in prompt:
        said = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': CALLS[tool]})}\n</tool_call>"
    elif submit.params.constraint is not None:
        said = FRIENDS
    else:
        said = SAID
    thought = "<think>Why is it?</think>" if "enable_thinking" in prompt or "reasoning_effort" in prompt else ""
    data = (thought + said).encode()
    return [list(data[at : at + 3]) for at in range(0, len(data), 3)]


NO_IMAGES = "only text"
NOT_SERVED = r"model '[^']+' is not loaded"
# The reason why an example does not end well, as it says itself.
REASONS: dict[str, str] = {}


def served() -> dict[str, Any]:
    tokenizer = ByteTokenizer(specials=FIM)
    tokenizer.chat_template = ThinkingTemplate()
    names = ModelSpec("null", "null", aliases=(*MODELS, *CODERS), reasoning=True)
    return {"tokenizer": tokenizer, "script": replace(NullScript(), answer=answer, embedding_size=8), "initial": (names,)}


def require_end(name: str, command: list[str | Path], folder: Path, url: str) -> None:
    """Run a program that may ask for an image, and require that it ends as `REASONS` says."""
    (folder / "cat.png").symlink_to(ROOT / "docs" / "images" / "console.png")
    environment = {**os.environ, "OLLAMA_HOST": url}
    done = subprocess.run(command, cwd=folder, env=environment, input="cat.png\n", capture_output=True, text=True, timeout=300)
    said = f"{done.stdout}\n{done.stderr}"
    print(f"=== {name}: {done.returncode}\n{said}")


@pytest.mark.parametrize("name", PYTHON)
def test_python(name: str, serve: Any, tmp_path: Path) -> None:
    url = serve(**served()).url
    for other in (other for other in PYTHON if other.endswith("helper.py")):
        (tmp_path / other).write_text(PYTHON[other])
    text = f"import ollama\n{PYTHON[name]}" if name.startswith("README") else PYTHON[name]
    (tmp_path / "program.py").write_text(ADDRESS.sub(url, text))
    require_end(name, [sys.executable, "program.py"], tmp_path, url)


@pytest.mark.parametrize("name", JAVASCRIPT)
def test_javascript(name: str, serve: Any, tmp_path: Path) -> None:
    if not (PACKAGES / "tsx").exists():
        pytest.skip("needs clients in JavaScript: make .venv/clients")
    url = serve(**served()).url
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    for other in (other for other in JAVASCRIPT if other.endswith("helpers.ts")):
        (tmp_path / Path(other).name).write_text(JAVASCRIPT[other])
    text = JAVASCRIPT[name] if "from 'ollama" in JAVASCRIPT[name] else f"import ollama from 'ollama'\n{JAVASCRIPT[name]}"
    (tmp_path / "program.mts").write_text(ADDRESS.sub(url, text))
    # the client reads no variable, so its requests are sent to another address
    send = f"const send = fetch; globalThis.fetch = (to, how) => send(String(to).replace('{DEFAULT}', '{url}'), how)"
    (tmp_path / "address.mjs").write_text(send)
    require_end(name, [node(), "--import", "tsx", "--import", "./address.mjs", "program.mts"], tmp_path, url)
