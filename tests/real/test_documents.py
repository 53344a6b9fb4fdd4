"""The commands that the documents show for serving a model are run with SmolLM2, which replaces other models in them. Of commands that are
then equal, only one runs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, CommandLine, greeting
from tests.kept_programs import kept_programs
from tests.real.conftest import FOLDER, file_of

pytestmark = pytest.mark.xdist_group("documents")

NAMES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for name in NAMES for path in sorted(ROOT.glob(name))}
PROGRAMS = "relaxserve|make|docker|kubectl|pipx|taskset|curl|codex|claude|export|[A-Z_]+=\\S+"
SHOWN = re.compile(rf"^    ((?:{PROGRAMS}) .*(?:\\\n.*)*|(?:{PROGRAMS}))$", re.MULTILINE)
ALL = sorted({re.sub(r" +# .*$", "", command) for text in PAGES.values() for command in SHOWN.findall(text)})
SERVED = re.compile(r"(?:taskset -c \S+ )?relaxserve (?:serve|run)\b")
# The distinctive part of each other command -> the test that runs it, or the reason why none does.
ELSEWHERE = {
    "--quantize 4bit": "tests/deploy/quantizing",
    "--config models.yaml": "tests/test_docs.py::test_a_configuration_is_read",
    "serve whisper-base": "tests/real/test_speech.py",
    "--tensor-parallel 4": "tests/deploy/test_tensor_parallel.py",
    "relaxserve stage --listen": "tests/e2e/test_lost_stages.py",
    "--stages 10.0.0.2:7070,local": "tests/e2e/test_lost_stages.py",
    "serve ./SmolVLM-256M-Instruct": "tests/e2e/test_images.py",
    '"content": [': "tests/e2e/test_images.py",
    "inspect smollm2 --quality": "tests/deploy/quality/test_speed.py::test_inspect_shows_and_recommends",
    "--mcp servers.json": "tests/real/test_mcp.py",
    "relaxserve chat --mcp": "tests/deploy/cli/test_tool_turns.py",
    "--mcp-server": "tests/server/api/openai/test_mcp.py",
    "--kv-events": "tests/server/fleet",
    "/v1/audio/transcriptions": "tests/server/api/speech",
    "--target web": "tests/deploy/export/test_web.py",
    "--target riscv64-linux": "tests/deploy/export/test_c.py",
    "bench fleet --measure": "tests/deploy/bench/serving/test_fleet.py",
    "bench fleet --simulate": "tests/deploy/bench/serving/test_fleet.py",
    "relaxserve dynamo": "tests/deploy/dynamo/test_worker.py",
    "relaxserve launch": "tests/deploy/cli/test_launch.py",
    "relaxserve pull": "tests/deploy/model_loading/test_packages.py::test_commands_know_the_names",
    "pipx install": "tests/deploy/test_wheel.py::test_the_demo_is_served_amid_packages_of_the_same_names",
    "kubectl apply": "tests/deploy/kubernetes/test_manifests.py::test_kubectl_builds_it",
    "docker compose": "tests/deploy/test_host_configuration.py::test_the_file_of_compose_is_in_its_schema",
    "make serve": "make itself: CI sets up by it",
    "make setup": "make itself: CI sets up by it",
    "make check": "the command that runs tests",
    "make test": "the command that runs tests",
    "make pytest": "the command that runs tests",
    "docker build": "it needs an engine for containers; tests/docker checks what goes into the image",
    "docker run": "it needs an engine for containers",
    "kubectl create": "it needs a cluster",
    "kubectl exec": "it needs a cluster",
    "codex -c": "the agent is no dependency: `python -m tests.lab agents` installs and runs it",
    "claude": "the agent is no dependency: `python -m tests.lab agents` installs and runs it",
    "export ": "the variables of agents, which `python -m tests.lab agents` sets",
}
COMMANDS = [command for command in ALL if SERVED.match(command)]
MODELS = ("~/models/Qwen2.5-0.5B-Instruct", "qwen2.5-coder-1.5b", "qwen2.5-coder", "qwen3-coder.gguf", "smollm2")
# What docs/operations.md shows for kept requests; FILE is the file of the server.
KEPT = (
    """curl -X PUT http://127.0.0.1:8000/admin/kept_requests -H 'Content-Type: application/json' -d '{"of": ["key=website"]}'""",
    "relaxserve replay FILE --url http://127.0.0.1:8001",
)
QUESTION = "What is the capital of France?"
KEYS = {"api-keys": "sk-of-a-client", "admin-keys": "sk-of-an-admin", "keys.txt": "sk-of-a-client"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the variables with which commands find the model by its short name, as after `relaxserve pull smollm2`. Servers of other tests
    must not find it: they would serve it beside the demo model."""
    cache_folder = tmp_path_factory.mktemp("cache")
    with kept_programs(cache_folder):
        downloaded = cache_folder / "models" / "smollm2.gguf"
        downloaded.parent.mkdir(mode=0o700)
        downloaded.symlink_to(file_of("smollm2"))
        own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")}
        yield {**own, "RELAXSERVE_CACHE": str(cache_folder), "PATH": f"{BIN}:{os.environ['PATH']}", "RELAXSERVE_KEY": KEYS["api-keys"]}


def adapted(command: str) -> str:
    """Return a command with a model, cores and a port that this machine has."""
    for model in MODELS:
        command = command.replace(model, str(FOLDER / "smollm2.gguf") if model.startswith("~") or model.endswith(".gguf") else "smollm2")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return re.sub(r" --port \d+", "", re.sub(r"-c \S+ relaxserve", f"-c {cores} relaxserve", command))


def elsewhere(command: str) -> list[str]:
    return [part for part in ELSEWHERE if part in command]


def distinct(part: str) -> list[str]:
    """Return the commands with this part that this file runs. Of commands that are equal when they are adapted to this machine, it returns
    one. A command on some cores counts as equal to the same command on all."""
    some = sorted((command for command in COMMANDS if part in command and not elsewhere(command)), key=len)
    return list({re.sub(r"^taskset -c \S+ ", "", adapted(command)): command for command in some}.values())


def test_every_shown_command_is_run_or_says_why_not() -> None:
    here = {command for command in COMMANDS if not elsewhere(command)} | {command for command in ALL if command in KEPT}
    assert len(here) >= 10 and set(KEPT) <= set(ALL)
    assert [command for command in ALL if command not in here and not elsewhere(command)] == []
    assert [part for part in ELSEWHERE if not any(part in command for command in ALL)] == []
    for place in (place for place in ELSEWHERE.values() if place.startswith("tests/")):
        file, _, name = place.partition("::")
        assert (ROOT / file).exists() and (not name or f"def {name}(" in (ROOT / file).read_text()), place


@pytest.mark.parametrize("command", distinct("relaxserve run"))
def test_a_conversation_begins_with_one_command(command: str, environment: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-euc", adapted(command)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.split()) > 1, done.stderr
    assert len(done.stderr.splitlines()) <= 1, "at most one line is to be read before the answer"


@pytest.mark.parametrize("command", distinct("relaxserve serve"))
def test_a_shown_server_answers(command: str, environment: dict[str, str], command_line: CommandLine, tmp_path: Path) -> None:
    for name, key in KEYS.items():
        (tmp_path / name).write_text(f"{key}\n")
        (tmp_path / name).chmod(0o600)
    words = [*adapted(command).split(" "), "--port", "0"]
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            url, _ = greeting(server)
            ask = [BIN / "relaxserve", "chat", QUESTION, "--temperature", "0", "--url", url]
            assert "Paris" in command_line.run(*ask, RELAXSERVE_KEY=KEYS["api-keys"])
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_kept_requests_are_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    def shell(command: str) -> str:
        done = subprocess.run(["bash", "-euc", adapted(command)], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    file = tmp_path / "kept.jsonl"
    words = ["relaxserve", "serve", "smollm2", "--port", "0", "--keep-requests", str(file)]
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            url, _ = greeting(server)
            shell(f"relaxserve chat '{QUESTION}' --url {url} --max-tokens 8")
            restrict, replay = (command.replace("FILE", str(file)) for command in KEPT)
            assert "key=website" in shell(restrict.replace("http://127.0.0.1:8000", url))
            shell(f"relaxserve chat 'Name a colour.' --url {url} --max-tokens 8")
            assert len(file.read_text().splitlines()) == 1
            assert "equal" in shell(replay.replace("http://127.0.0.1:8001", url))
        finally:
            server.terminate()
            server.communicate(timeout=60)
