"""The examples of Ollama's Python and JavaScript clients, run as their authors publish them: each ends well, or for a reason that is named.

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
from tests.node import PACKAGES, node
from tests.server.api.vendors.double import ThinkingTemplate

PROGRAMS = json.loads((ROOT / "tests" / "golden" / "vendors" / "ollama_examples.json").read_text())
PYTHON, JAVASCRIPT = (PROGRAMS[language]["programs"] for language in ("python", "javascript"))
DEFAULT = "http://127.0.0.1:11434"
ADDRESS = re.compile(rf"{re.escape(DEFAULT)}|http://localhost:11434")
MODELS = ("gemma4", "gemma3", "llama3.1", "llama3.1:8b", "llama3.2", "qwen3", "mistral", "deepseek-r1", "gpt-oss:20b", "gpt-oss")
VISION = ("llava", "llama3.2-vision")
CODERS = ("codellama:7b-code", "deepseek-coder-v2")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SAID = "Rayleigh scattering."
FRIENDS = '{"friends": [{"name": "Ollama", "age": 22, "is_available": false}]}'
SUM, CITY = '{"a": 3, "b": 1}', '{"city": "Paris"}'
CALLS = {
    **dict.fromkeys(("add_two_numbers", "addTwoNumbers"), SUM),
    **dict.fromkeys(("get_temperature", "getTemperature", "get_weather"), CITY),
    "get_flight_times": '{"departure": "LGA", "arrival": "LAX"}',
}


def answer(submit: Submit, _choice: int) -> list[list[int]]:
    """Call a tool that the prompt shows and that has not answered yet, write JSON if a format is demanded, or else say something."""
    prompt = bytes(each for each in submit.prompt_ids if each < 256).decode()
    tool = next((name for name in CALLS if f'"{name}"' in prompt.partition("\n")[0]), None)
    if tool is not None and "<|tool|>" not in prompt:
        said = f'<tool_call>\n{{"name": "{tool}", "arguments": {CALLS[tool]}}}\n</tool_call>'
    elif submit.params.constraint is not None:
        said = FRIENDS
    else:
        said = SAID
    thought = "<think>Why is it?</think>" if "enable_thinking" in prompt or "reasoning_effort" in prompt else ""
    data = (thought + said).encode()
    return [list(data[at : at + 3]) for at in range(0, len(data), 3)]


# The reason why an example does not end well, as it says itself.
NO_IMAGES = r"only reads text"
NOT_LOADED = r"model '[^']+' is not loaded"
NO_DECISIONS = r"/v1/systemone"  # this needs a model that was made for it
REASONS = {
    "python": {
        "README 14": r"/api/push",  # models are published elsewhere
        "README 18": NO_DECISIONS,
        "README 19": r"Error: model 'does-not-yet-exist' is not loaded[\s\S]*does not exist below",  # it pulls the model then
        "chat-with-history.py": rf"{SAID}\n[\s\S]*EOFError",  # it asks for further messages
        "generate-image.py": NOT_LOADED,
        "multimodal-chat.py": NO_IMAGES,
        "structured-outputs-image.py": NO_IMAGES,
        "systemone.py": NO_DECISIONS,
        "web-search-gpt-oss.py": NOT_LOADED,  # a model of the vendor's cloud
    },
    "javascript": {
        "README 8": NO_DECISIONS,
        "image-generation/image-generation.ts": NOT_LOADED,
        "multimodal/multimodal.ts": NO_IMAGES,
        "structured_outputs/structured-outputs-image.ts": NO_IMAGES,
    },
}
# Programs that ask others first.
ELSEWHERE = {
    "multimodal-generate.py": "it downloads an image",
    "web-search-mcp.py": "it is a server of tools, and needs a package for that",
}


def tokenizer() -> ByteTokenizer:
    made = ByteTokenizer(specials=FIM)
    made.chat_template = ThinkingTemplate()
    return made


SERVED = {
    "tokenizer": tokenizer(),
    "script": replace(NullScript(), answer=answer, embedding_size=8),
    "initial": (ModelSpec("null", "null", aliases=(*MODELS, *CODERS, *VISION), reasoning=True),),
}
pytestmark = pytest.mark.parametrize("shared_server", [SERVED], indirect=True)


# Runs all programs in one process, so that the client is imported only once, and prints what each says.
RUN_ALL = """
import contextlib, io, json, sys, traceback
sys.path.insert(0, ".")
for name, text in json.load(open("programs.json")).items():
    said, sys.stdin, status = io.StringIO(), io.StringIO("cat.png\\n"), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
    print(json.dumps([name, status, said.getvalue()]))
"""
Ended = tuple[int, str]  # the status of a program, and what it has said


def run(command: list[str | Path], folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may ask for an image."""
    if not (folder / "cat.png").exists():
        (folder / "cat.png").symlink_to(ROOT / "docs" / "images" / "console.png")
    environment = {**os.environ, "OLLAMA_HOST": url, "OLLAMA_API_KEY": "unused"}
    return subprocess.run(command, cwd=folder, env=environment, input="cat.png\n", capture_output=True, text=True, timeout=300)


def require_end(language: str, name: str, status: int, said: str) -> None:
    """Require that a program ended as `REASONS` says."""
    reason = REASONS[language].get(name)
    if reason is not None:
        assert re.search(reason, said), said
        return
    assert status == 0 and "rror" not in said, said
    assert said.strip() or name.startswith("README") or "helper" in name, "it says nothing"


@pytest.fixture(scope="module")
def python_ends(shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder, url = tmp_path_factory.mktemp("python"), shared_server.url
    programs = {name: text for name, text in PYTHON.items() if name not in ELSEWHERE}
    for name in (name for name in programs if name.endswith("helper.py")):
        (folder / name).write_text(programs[name])
    whole = {name: ADDRESS.sub(url, f"import ollama\n{text}" if name.startswith("README") else text) for name, text in programs.items()}
    last = dict.fromkeys(name for name, text in programs.items() if "delete(" in text)  # they delete a model that others ask
    (folder / "programs.json").write_text(json.dumps({name: whole[name] for name in [*(whole.keys() - last.keys()), *last]}))
    done = run([sys.executable, "-c", RUN_ALL], folder, url)
    assert done.returncode == 0, done.stderr
    return {name: (status, said) for name, status, said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [name for name in PYTHON if name not in ELSEWHERE])
def test_python(name: str, python_ends: dict[str, Ended]) -> None:
    require_end("python", name, *python_ends[name])


@pytest.mark.parametrize("name", JAVASCRIPT)
def test_javascript(name: str, shared_server: Any, tmp_path: Path) -> None:
    if not (PACKAGES / "tsx").exists():
        pytest.skip("needs clients in JavaScript: make .venv/clients")
    url = shared_server.url
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    for other in (other for other in JAVASCRIPT if other.endswith("helpers.ts")):
        (tmp_path / Path(other).name).write_text(JAVASCRIPT[other])
    text = JAVASCRIPT[name] if "from 'ollama" in JAVASCRIPT[name] else f"import ollama from 'ollama'\n{JAVASCRIPT[name]}"
    (tmp_path / "program.ts").write_text(ADDRESS.sub(url, text))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    # the client reads no variable, so its requests are sent to another address
    send = f"const send = fetch; globalThis.fetch = (to, how) => send(String(to).replace('{DEFAULT}', '{url}'), how)"
    (tmp_path / "address.mjs").write_text(send)
    done = run([node(), "--import", "tsx", "--import", "./address.mjs", "program.ts"], tmp_path, url)
    require_end("javascript", name, done.returncode, f"{done.stdout}\n{done.stderr}")
