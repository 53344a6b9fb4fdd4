"""The commands that the documents show for serving a model, run with SmolLM2. Other models in them are replaced by it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, greeting
from tests.real.conftest import file_of

pytestmark = pytest.mark.xdist_group("documents")

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SHOWN = re.compile(r"^    ((?:taskset -c \S+ )?relaxserve (?:serve|run)\b[^#\n]*)", re.MULTILINE)
COMMANDS = sorted({command.strip() for text in PAGES.values() for command in SHOWN.findall(text)})
# Commands that other tests cover: the command's distinctive part, and the test.
COVERED = {
    "--quantize 4bit": "tests/deploy/quantizing",
    "--config models.yaml": "tests/test_docs.py::test_a_configuration_is_read",
    "./whisper-base": "tests/e2e/test_speech.py",
    "--mcp servers.json": "tests/real/test_mcp.py",
    "--kv-events": "tests/server/fleet",
}
MODELS = ("~/models/Qwen2.5-0.5B-Instruct", "qwen2.5-coder-1.5b", "qwen2.5-coder", "qwen3-coder.gguf", "smollm2")
QUESTION = "What is the capital of France?"
KEYS = {"api-keys": "sk-of-a-client", "admin-keys": "sk-of-an-admin", "keys.txt": "sk-of-a-client"}


@pytest.fixture(scope="module")
def environment(cache_folder: Path) -> dict[str, str]:
    """Return the variables with which commands find the model by its short name, as after `relaxserve pull smollm2`."""
    downloaded = cache_folder / "models" / "smollm2.gguf"
    downloaded.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not downloaded.exists():
        downloaded.symlink_to(file_of("smollm2"))
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")}
    return {**own, "RELAXSERVE_CACHE": str(cache_folder), "PATH": f"{BIN}:{os.environ['PATH']}", "RELAXSERVE_KEY": KEYS["api-keys"]}


def adapted(command: str) -> list[str]:
    """Return the words of a command with a model, cores and a port that this machine has."""
    for model in MODELS:
        command = command.replace(model, str(file_of("smollm2")) if model.startswith("~") or model.endswith(".gguf") else "smollm2")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return re.sub(r"-c \S+ relaxserve", f"-c {cores} relaxserve", command).split(" ")


def test_the_documents_show_commands() -> None:
    assert len([command for command in COMMANDS if not any(part in command for part in COVERED)]) >= 6
    assert all(any(part in command for command in COMMANDS) for part in COVERED)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("relaxserve run")])
def test_a_conversation_begins_with_one_command(command: str, environment: dict[str, str]) -> None:
    line = " ".join(adapted(command))
    done = subprocess.run(["bash", "-euc", line], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.split()) > 1, done.stderr


@pytest.mark.parametrize("command", [one for one in COMMANDS if "relaxserve serve" in one and not any(part in one for part in COVERED)])
def test_a_shown_server_answers(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    for name, key in KEYS.items():
        (tmp_path / name).write_text(f"{key}\n")
        (tmp_path / name).chmod(0o600)
    words = [*adapted(re.sub(r" --port \d+", "", command)), "--port", "0"]
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            url, _ = greeting(server)
            ask = ["relaxserve", "chat", QUESTION, "--temperature", "0", "--url", url]
            answer = subprocess.run(ask, env=environment, capture_output=True, text=True, timeout=300)
            assert "Paris" in answer.stdout, answer.stderr
        finally:
            server.terminate()
            server.communicate(timeout=60)
