"""The commands of relaxserve, run as a user types them. All tests share one server with the demo model."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import typer
from typer.testing import CliRunner

from deploy import demo
from deploy.cli import admin, models, running
from deploy.cli.commands import app
from deploy.cli.serve import greet
from deploy.cli.sources import OPTIONS
from deploy.client import Client, ServerFault
from deploy.settings import DEFAULTS, MODEL_KEYS, SETTINGS, parse
from runtime.sealed import key_of
from runtime.sections import SectionFile
from server.models.registry import Registry
from server.settings import ServerSettings
from tests.conftest import workers_of
from tests.terminal import PROMPT, terminal

pytestmark = pytest.mark.xdist_group("demo server")

QUESTION = "What is the capital of France?"


def commands() -> list[str]:
    root: Any = typer.main.get_command(app)
    return [*root.commands, *(f"cache {name}" for name in root.commands["cache"].commands)]


@pytest.mark.parametrize("command", commands())
def test_every_help_has_examples(command: str) -> None:
    said = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="relaxserve")
    assert said.exit_code == 0
    assert command == "cache" or ("Examples" in said.output and f"relaxserve {command}" in said.output)


def test_a_default_that_help_shows_can_be_given() -> None:
    said = CliRunner().invoke(app, ["serve", "--help-all"], prog_name="relaxserve", env={"COLUMNS": "200"}).output
    for setting in SETTINGS:
        option = f"│ --{setting.name.replace('_', '-')} "
        if DEFAULTS[setting.name] not in (None, (), False):
            line = next(line for line in said.splitlines() if option in line)
            shown = line.rpartition("(")[2].partition(")")[0]
            assert parse(setting.name, shown, option) == DEFAULTS[setting.name], line


@pytest.mark.parametrize("command", ["serve", "load"])
def test_every_field_of_a_model_is_an_option(command: str) -> None:
    """docs/configuration.md says that every field is an option, and an alert advises --kv-cache-bytes. `load` lacks two of them, because a
    request to a running server may name neither files nor hosts of the server."""
    root: Any = typer.main.get_command(app)
    options = {name for param in root.commands[command].params for name in param.opts}
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    table = page.partition("| Field of a model |")[2].partition("\n\n")[0]
    fields = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert set(fields) == set(MODEL_KEYS)
    given = {"aliases": "--alias", "defaults": "--default"}
    missing = {field for field in fields if given.get(field, f"--{field.replace('_', '-')}") not in options}
    assert missing == ({"source", "name"} if command == "serve" else {"source", "calibrate", "stages"}), (
        "these are arguments: PATH_OR_ID=NAME"
    )


def test_every_command_that_takes_a_device_takes_several() -> None:
    """Otherwise, what `compile` keeps for several GPUs is not what `serve` looks for."""
    root: Any = typer.main.get_command(app)
    options = {name: {option for param in command.params for option in param.opts} for name, command in root.commands.items()}
    on_devices = {name for name, names in options.items() if "--device" in names}
    assert {"compile", "serve"} <= on_devices
    assert on_devices == {name for name, names in options.items() if "--tensor-parallel" in names}


def test_commands_call_the_options_of_a_load_alike() -> None:
    """Whoever has learnt an option with `serve` can use it, under the same names and within the same limits, with `compile`."""
    root: Any = typer.main.get_command(app)
    names = {"serve": {param.name: param.opts for param in root.commands["serve"].params}}
    takers = {
        name: [
            param
            for param in command.params
            if param.name in OPTIONS and not (name == "export" and param.name in ("target", "max_context"))
        ]
        for name, command in root.commands.items()
    }
    assert {"compile", "export", "generate", "inspect", "load", "run", "serve"} <= {name for name, found in takers.items() if found}
    for name in ("compile", "export", "generate", "inspect", "load", "run"):
        assert {param.name: param.opts for param in takers[name]}.items() <= names["serve"].items(), name
    said = CliRunner().invoke(app, ["compile", "demo", "--ctx-size", "3"], prog_name="relaxserve", env={"COLUMNS": "200"})
    assert said.exit_code == 2 and "'3' is not a number from 16" in said.output


@pytest.mark.parametrize("command", ["generate demo -p hi --temperature", "unload demo --drain-s"])
@pytest.mark.parametrize("value", ["inf", "1e9"])
def test_numbers_that_a_server_would_refuse_are_refused(command: str, value: str) -> None:
    said = CliRunner().invoke(app, [*command.split(), value], prog_name="relaxserve", env={"COLUMNS": "200"})
    assert said.exit_code == 2 and "Input should be less than or equal to" in said.output


def help_of_serve(option: str) -> list[str]:
    return CliRunner().invoke(app, ["serve", option], prog_name="relaxserve", env={"COLUMNS": "80"}).output.splitlines()


def test_the_help_of_serve_is_a_page_and_says_where_the_rest_is() -> None:
    said = help_of_serve("--help")
    assert len(said) <= 60 and help_of_serve("-h") == said
    options = re.findall(r"^│ (--[\w-]+)", "\n".join(said), re.MULTILINE)
    assert {"--port", "--quantize", "--api-key-file", "--config", "--help-all"} <= set(options) and "--max-choices" not in options


def test_the_whole_help_of_serve_has_every_option() -> None:
    """On 80 columns, most of the width belongs to the meanings. What the first page leaves out can be given all the same."""
    said = help_of_serve("--help-all")
    (line,) = (line for line in said if "--max-body-bytes" in line)
    assert line.index("Largest request body") < 40
    assert len(said) <= 220 and not any("--no-" in line and "│" in line for line in said)
    root: Any = typer.main.get_command(app)
    shown = set(re.findall(r"^│ (--[\w-]+)", "\n".join(said), re.MULTILINE))
    assert {param.opts[0] for param in root.commands["serve"].params if param.param_type_name == "option"} <= shown


@pytest.mark.parametrize("command", ["serve", "cache ls", ""])
def test_help_is_a_command_too(command: str) -> None:
    helped, asked = (
        CliRunner().invoke(app, words, prog_name="relaxserve") for words in (["help", *command.split()], [*command.split(), "-h"])
    )
    assert helped.exit_code == 0 and helped.output.split() == asked.output.split()


def test_unload_waits_longer_than_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Server(Client):
        def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
            waits.append(timeout_s)

        def delete(self, path: str) -> Any:
            return {"name": path, "freed_bytes": 0}

    monkeypatch.setattr(admin, "Client", Server)
    for drain_s in (0, 5000):
        admin.unload("qwen", drain_s=drain_s)
    assert waits[0] >= 60 and waits[1] > 5000 + 60


def test_stop_waits_as_long_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting `drain_s` of the server, which no client knows, says how long running requests may continue."""
    waits: list[float | None] = []

    class Server(Client):
        def __init__(self, url: str, key: str | None = None, timeout_s: float | None = 600.0) -> None:
            waits.append(timeout_s)

        def post(self, path: str, body: Any) -> Any:
            return {"is_sleeping": True}

    monkeypatch.setattr(running, "Client", Server)
    running.stop("qwen")
    assert waits == [None]


def test_ps_works_with_a_key_of_clients(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Server(Client):
        def get(self, path: str) -> Any:
            if path == "/admin/models":
                raise ServerFault("/admin/models needs an admin key", "admin_key_required")
            return {"data": [{"id": "qwen", "aliases": ["gpt-4o"], "max_model_len": 4096}]}

    monkeypatch.setattr(admin, "Client", Server)
    admin.ps(as_json=True, url="http://127.0.0.1:1")
    assert json.loads(capsys.readouterr().out)[0]["id"] == "qwen"
    admin.ps(url="http://127.0.0.1:1")
    assert "qwen, gpt-4o" in capsys.readouterr().out


def test_chat_streams_one_answer(demo_server: Any) -> None:
    assert "Paris" in demo_server.run("relaxserve", "chat", QUESTION, "--temperature", "0")


def test_a_conversation_remembers(demo_server: Any) -> None:
    """In an interactive conversation, the model sees the earlier turns. The test uses a pseudo-terminal."""
    with terminal(["relaxserve", "chat"], demo_server.environment) as chat:
        for line in ("My name is Tom.\n", "What is my name?\n", "\x04"):
            chat.until(PROMPT)
            chat.write(line)
        assert chat.ended() == 0
    assert "Ctrl-D leaves" in chat.said
    assert "Tom" in chat.said.partition("What is my name?")[2], chat.said


def test_chat_asks_the_named_model(demo_server: Any) -> None:
    said = demo_server.run("relaxserve", "chat", QUESTION, "--model", "nobody", status=1)
    assert said.startswith("error: model 'nobody' is not loaded; loaded are: demo")


def test_run_serves_a_model_for_one_conversation(demo_server: Any, tmp_path: Path) -> None:
    """`run` serves a model for one conversation and leaves no process behind. It ignores environment variables that name other servers."""
    elsewhere = {"RELAXSERVE_API_KEYS": "a-key-of-a-client", "RELAXSERVE_URL": "http://127.0.0.1:1"}
    said = demo_server.run("relaxserve", "run", "demo", QUESTION, "--temperature", "0", "--max-context", "512", **elsewhere)
    assert "Paris" in said
    said = demo_server.run("relaxserve", "run", "/no/such/model", QUESTION, status=2)
    assert said.startswith("error: model '/no/such/model' does not exist; expected a folder, a .gguf file")
    (tmp_path / "broken.gguf").write_bytes(b"<html>no such page</html>")
    said = demo_server.run("relaxserve", "run", tmp_path / "broken.gguf", QUESTION, status=1)
    assert "broken.gguf" in said and "the lines above give the reason" in said


def test_generate_gives_the_answer_of_the_server(demo_server: Any) -> None:
    """`generate` runs the engine without a server, in its own process, and gives the same answer as the server."""
    served = demo_server.run("relaxserve", "chat", QUESTION, "--temperature", "0")
    assert demo_server.run("relaxserve", "generate", "demo", "-p", QUESTION) == served


def test_generate_is_repeatable_by_seed(demo_server: Any) -> None:
    command = ["relaxserve", "generate", "demo", "-p", "Tell me a story", "--temperature", "1", "--max-tokens", "24", "--json"]
    first, again, other = (json.loads(demo_server.run(*command, "--seed", seed))["token_ids"] for seed in ("1", "1", "2"))
    assert first == again != other
    assert len(first) <= 24


def test_inspect_tells_what_the_server_takes(demo_server: Any) -> None:
    found = json.loads(demo_server.run("relaxserve", "inspect", "demo", "--json"))
    (served,) = json.loads(demo_server.run("relaxserve", "ps", "--json"))
    assert found["family"] == "llama" and found["fits"]
    assert found["serves"] == ["chat and completions"] and not found["embedding_note"]
    assert found["num_parameters"] == pytest.approx(3.5e6, rel=0.01)
    assert sum(found["bytes_by_part"].values()) == found["file_bytes"]
    assert found["plan"]["num_pages"] == served["pages"]["total"]
    assert found["plan"]["weights_bytes"] == served["bytes"]["weights"]


def test_inspect_shows_the_inputs_of_the_program(demo_server: Any) -> None:
    said = demo_server.run("relaxserve", "inspect", "demo")
    assert "(i32[n0], i32[n0]," in said and "47 weights) where n0 in 0..512" in said


def test_inspect_says_what_would_fit(demo_server: Any) -> None:
    command = ["relaxserve", "inspect", "demo", "--kv-cache-bytes", "900T", "--max-batch", "4096", "--json"]
    found = json.loads(demo_server.run(*command))
    assert not found["fits"]
    (remedy,) = found["remedies"]
    assert remedy.startswith("--kv-cache-bytes ")


def test_compile_finds_what_the_server_compiled(demo_server: Any) -> None:
    assert "was in the cache" in demo_server.run("relaxserve", "compile", "demo")


def test_cache_ls_names_the_models(demo_server: Any) -> None:
    said = demo_server.run("relaxserve", "cache", "ls", COLUMNS="300")
    assert re.search(r"^ *(.*, )?demo\b.* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", said, re.MULTILINE), said


def test_cache_verify_names_what_is_damaged_and_the_next_start_builds_it_again(demo_server: Any, demo_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_cache, cache := tmp_path / "cache")
    said = demo_server.run("relaxserve", "cache", "verify", RELAXSERVE_CACHE=str(cache))
    assert re.search(r"sound +executables/\w+-\w+\.rsx\n", said) and re.search(r"sound +weights/\w+-\w+\.rsw\n", said)
    packed = flip_a_weight(cache)
    command = ["relaxserve", "cache", "verify"]
    said = demo_server.run(*command, status=1, RELAXSERVE_CACHE=str(cache))
    assert "1 damaged: `relaxserve cache verify --remove` removes them" in said
    demo_server.run(*command, "--remove", status=1, RELAXSERVE_CACHE=str(cache))
    assert not packed.exists()
    demo_server.run("relaxserve", "generate", "demo", "-p", QUESTION, RELAXSERVE_CACHE=str(cache))
    assert "damaged" not in demo_server.run(*command, RELAXSERVE_CACHE=str(cache))


@pytest.fixture(scope="module")
def demo_cache(demo_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with only the demo model's files. The cache of the shared server also contains models of other tests."""
    cache = tmp_path_factory.mktemp("demo") / "cache"
    demo_server.run("relaxserve", "generate", "demo", "-p", QUESTION, RELAXSERVE_CACHE=str(cache))
    return cache


def flip_a_weight(cache: Path) -> Path:
    """Flip one bit of the largest section of the packed weights. This replaces the file instead of changing it, because a server may have
    mapped the old file."""
    (packed,) = (cache / "weights").glob("*.rsw")
    largest = max(SectionFile(packed, key_of(packed.parent))._sections.values(), key=lambda section: section.size)
    content = bytearray(packed.read_bytes())
    content[largest.offset + largest.size // 2] ^= 64
    packed.unlink()
    packed.write_bytes(content)
    return packed


@pytest.mark.parametrize("last", ["ended in order", "was killed"])
def test_a_flipped_bit_in_packed_weights_is_found_and_mended(last: str, demo_server: Any, demo_cache: Path, tmp_path: Path) -> None:
    """A flipped bit in packed weights is found, and the weights are packed again. If the last process that used the weights was killed, the
    server checks them before the model is ready. Otherwise it checks them while the model runs, and then replaces the worker."""
    shutil.copytree(demo_cache, cache := tmp_path / "cache")
    packed = flip_a_weight(cache)
    if last == "was killed":
        packed.with_name(f"{packed.name}.used-killed").touch()
    with second_server(demo_server, cache) as (url, _):
        num_restarts = 1 if last == "ended in order" else 0
        while (model := model_of(url))["restarts"] < num_restarts:
            assert model["state"] in ("ready", "restarting")
            time.sleep(0.05)
        expected = demo_server.run("relaxserve", "chat", QUESTION, "--temperature", "0")
        assert demo_server.run("relaxserve", "chat", QUESTION, "--temperature", "0", RELAXSERVE_URL=url) == expected
        assert model["restarts"] == num_restarts
    demo_server.run("relaxserve", "cache", "verify", RELAXSERVE_CACHE=str(cache))
    assert not list(packed.parent.glob("*.used-*")), "the worker did not end cleanly"


@contextmanager
def second_server(demo_server: Any, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    environment = {**demo_server.environment, "RELAXSERVE_CACHE": str(cache)}
    with subprocess.Popen(["relaxserve", "serve", "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            while (found := re.search(r"relaxserve at (http://[\w.:]+):", line := server.stderr.readline())) is None:
                assert line, "the server ended"
            yield found[1], server
        finally:
            server.terminate()
            server.communicate(timeout=60)


def model_of(url: str) -> dict[str, Any]:
    """Return what a server says of its first model."""
    with urlopen(f"{url}/admin/models") as answer:
        return json.load(answer)["data"][0]


def test_doctor_says_what_is_there(demo_server: Any) -> None:
    facts = json.loads(demo_server.run("relaxserve", "doctor", "--json"))
    assert facts["num_cores"] >= 1 and facts["faults"] == []
    assert facts["memory"]["available_bytes"] <= facts["memory"]["total_bytes"]


def test_bench_lists_and_runs(demo_server: Any) -> None:
    assert "benchmarks: fleet, kernels, model, quality, serve" in demo_server.run("relaxserve", "bench")
    assert "--clients" in demo_server.run("relaxserve", "bench", "serve", "--help")
    assert "benchmark 'nothing' is unknown; known: " in demo_server.run("relaxserve", "bench", "nothing", status=2)


@pytest.mark.parametrize(
    ("command", "status", "complaint"),
    [
        (["serve", "--host", "0.0.0.0"], 2, "no API key is set"),
        (["serve", "--port", "70000"], 2, "port is 70000; expected 0 to 65535"),
        (["serve", "/no/such/model"], 2, "'/no/such/model' does not exist"),
        (["serve", "nosuch.gguf"], 2, "'nosuch.gguf' does not exist"),
        (["run", "nosuch"], 2, "'nosuch' does not exist"),
        (["serve", "-m", "nosuch", "-c", "512", "--served-model-name", "x"], 2, "'nosuch' does not exist"),
        (["serve", "--max-model-len", "3"], 2, "'3' is not a number from 16"),
        (["help", "nosuch"], 2, "'nosuch' is no command"),
        (["inspect", "qwen"], 2, "'qwen' does not exist"),
        (["pull", "llama3.2"], 2, "'llama3.2' cannot be downloaded; expected a hub id"),
        (["serve", "--max-body-bytes", "much"], 2, "'much'"),
        (["serve", "demo", "--max-batch", "5000"], 2, "'5000' is not a number from 1 to 4096"),
        (["serve", "demo", "--kv-cache-bytes", "much"], 2, "'much' is not a number of bytes"),
        (["serve", "demo", "demo=d", "--alias", "x"], 2, "--alias with 2 models; expected one model"),
        (["serve", "demo", "--tool-parser", "xml"], 2, "tool_parser of model 'demo' is 'xml'; expected one of "),
        (["serve", "demo", "--tool-call-parser", "xml"], 2, "tool_parser of model 'demo' is 'xml'; expected one of "),
        (["serve", "--config", "/no/such/file"], 2, "name a file that can be read"),
        (["ps", "--url", "http://127.0.0.1:9"], 1, "start one with `relaxserve serve`"),
        (["ps", "--url", "somewhere"], 1, "expected http://HOST:PORT"),
        (["serve", "--state-file", "/proc/x"], 2, "name a file in a folder that can be written"),
        (["load", "../outside"], 1, "lies outside the model root"),
        (["load", "x", "--kv-cache-bytes", "much"], 2, "expected a number such as 1000000"),
        (["unload", "nobody"], 1, "model 'nobody' is not loaded"),
        (["generate", "./no/such/model", "-p", "x"], 2, "does not exist"),
        (["generate", "demo", "-p", "x", "--kv-dtype", "f64"], 1, "kv_dtype is 'f64'; expected one of auto, f32, f16, bf16, int8"),
        (["generate", "demo", "-p", "x", "--seed", str(1 << 64)], 2, "Invalid value for '--seed'"),
        (["export", "demo", "-o", "/proc/x"], 1, "/proc/x cannot be made: No such file or directory; name another folder with --output"),
        (["inspect", "demo", "--quantize", "int3"], 1, "quantize is 'int3'; expected"),
        (["compile", "demo", "--target", "avx3"], 1, "unknown target 'avx3'; known: host, x86-64-v3"),
        (["load", "demo", "--target", "avx3"], 1, "target is 'avx3'; expected one of host, x86-64-v3"),
        (["serve", "--port", "0", "--target", "avx3"], 1, "demo: unknown target 'avx3'; known: host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_said_in_a_line(command: list[str], status: int, complaint: str, demo_server: Any) -> None:
    said = demo_server.run("relaxserve", *command, status=status, COLUMNS="500")
    assert complaint in said
    assert "Traceback" not in said


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_start_on_a_terminal_is_one_line(demo_server: Any, level: str) -> None:
    """The lines of the log about loads are for those who have no progress bar, and for those who ask for them."""
    with terminal(["relaxserve", "serve", "demo", "--port", "0", "--log-level", level], demo_server.environment) as server:
        said = server.until(r"relaxserve at .*\n")
        server.interrupt()
        assert server.ended() == 130
    lines = [line for line in said.splitlines() if line.strip()]
    models = r"demo \([\d.]+ MiB in memory, context [\d,]+\), a toy: .*"
    assert re.fullmatch(rf"relaxserve at (http://127\.0\.0\.1:\d+): {models}; console at \1/, API at \1/v1", lines[-1])
    assert (len(lines) == 1) is (level == "info") and ("demo is ready after" in said) is (level == "debug")


def test_a_port_that_is_taken_is_refused(demo_server: Any) -> None:
    port = demo_server.url.rpartition(":")[2]
    said = demo_server.run("relaxserve", "serve", "--port", port, status=2)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in said


def test_the_form_of_models_is_theirs_in_a_file(demo_server: Any, tmp_path: Path) -> None:
    (config := tmp_path / "models.yaml").write_text(f"models:\n- {demo.MODEL}\n")
    said = demo_server.run("relaxserve", "serve", "--config", str(config), "--quantize", "int8", "--kv-dtype", "int8", status=2)
    assert "--quantize, --kv-dtype without MODEL" in said


def test_a_server_whose_only_model_fails_ends(demo_server: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    said = demo_server.run("relaxserve", "serve", "--port", "0", f"{tmp_path}=x", "--quantize", "int8", status=1)
    assert "x: model_type 'unheard_of' is not known; known are " in said
    assert "relaxserve at" not in said


def test_models_come_and_go(demo_server: Any, tmp_path: Path) -> None:
    """A server that starts without a model loads and unloads models by commands."""
    state = tmp_path / "state.json"
    state.write_text('{"models": []}')
    command = ["relaxserve", "serve", "--port", "0", "--model-root", str(demo.MODEL.parent), "--state-file", str(state)]
    # If there is a Service called relaxserve, Kubernetes sets this variable in pods.
    environment = {**demo_server.environment, "RELAXSERVE_PORT": "tcp://10.0.0.1:8000"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert "ignored: RELAXSERVE_PORT; Kubernetes" in server.stderr.readline()
        url = server.stderr.readline().split()[2].rstrip(":")
        try:
            said = demo_server.run("relaxserve", "serve", "--port", "0", "--state-file", state, status=2)
            assert f"is used by another server (process {server.pid})" in said
            assert "small is ready" in demo_server.run(
                "relaxserve", "load", "model", "--name", "small", "--alias", "tiny", RELAXSERVE_URL=url
            )
            assert "tiny" in demo_server.run("relaxserve", "ps", RELAXSERVE_URL=url)
            assert "Paris" in demo_server.run("relaxserve", "chat", QUESTION, "--model", "tiny", RELAXSERVE_URL=url)
            refused = demo_server.run("relaxserve", "unload", "tiny", status=1, RELAXSERVE_URL=url)
            assert "'tiny' is an alias of model 'small'; unload 'small'" in refused
            assert "gave back" in demo_server.run("relaxserve", "unload", "small", RELAXSERVE_URL=url)
            said = demo_server.run("relaxserve", "chat", QUESTION, status=1, RELAXSERVE_URL=url)
            assert "has no model that generates text by a chat template; load one with `relaxserve load`" in said
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_idle_connections_leave_descriptors_for_a_restart(demo_server: Any) -> None:
    """Idle connections do not use up the file descriptors: even if more clients connect than files may be open, the server restarts a dead
    worker and answers questions."""
    command = ["bash", "-c", "ulimit -n 128; exec relaxserve serve --port 0"]
    with subprocess.Popen(command, env=demo_server.environment, stderr=subprocess.PIPE, text=True) as server, ExitStack() as stack:
        stack.callback(server.terminate)
        assert server.stderr is not None
        assert "128 open files are allowed: only 32 connections are accepted" in server.stderr.readline()
        url = next(line for line in server.stderr if line.startswith("relaxserve at")).split()[2].rstrip(":")
        host, port = url.removeprefix("http://").split(":")
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        (worker,) = workers_of(server.pid)
        os.kill(worker, signal.SIGKILL)
        assert "Paris" in demo_server.run("relaxserve", "chat", QUESTION, RELAXSERVE_URL=url)
        assert model_of(url)["restarts"] == 1
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 100


def test_an_interrupt_during_the_imports_ends_without_a_traceback() -> None:
    """Ctrl-C in the first 0.3 s of a command printed where Python was importing modules."""
    words = (
        "import os, relaxserve, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background jobs ignore it
        "relaxserve._load_launch = lambda: os.kill(os.getpid(), signal.SIGINT); relaxserve.main()"
    )
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_the_version_can_be_asked_for() -> None:
    said = [CliRunner().invoke(app, [word], prog_name="relaxserve") for word in ("--version", "-V", "version")]
    assert all(one.exit_code == 0 and re.fullmatch(r"relaxserve \d+\.\d+\.\d+\n", one.output) for one in said)


def test_the_usage_of_bench_names_what_it_takes() -> None:
    assert "relaxserve bench [NAME [OPTIONS]]" in CliRunner().invoke(app, ["bench"], prog_name="relaxserve").output


def test_completion_is_offered(demo_server: Any) -> None:
    assert "_RELAXSERVE_COMPLETE" in demo_server.run(
        "relaxserve", "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )


def test_help_does_not_wait_for_a_compiler(demo_server: Any) -> None:
    loaded = demo_server.run(sys.executable, "-c", "import sys, deploy.cli; print(*sys.modules)").split()
    assert not {"llvmlite", "fastapi", "uvicorn", "tokenizers"} & set(loaded)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")], ids=str)
def test_a_server_goes_on_if_nobody_can_read_its_greeting(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    def nothing(*_: object) -> Any:
        raise AssertionError("nothing is loaded")

    registry = Registry(ServerSettings(), nothing, nothing)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert asyncio.run(greet(registry, "http://127.0.0.1:1"))


def test_a_server_may_write_what_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log shows paths and what libraries print. An error would end the conversation, or leave the server with a pipe that fills."""
    words = 'b"\\xff\\nrelaxserve at http://127.0.0.1:1: m\\n\\xff\\n"'
    program = f"import os, signal; os.write(2, {words}); signal.pause()"
    monkeypatch.setattr(models, "SERVE", (sys.executable, "-c", program))
    with models._serving("m", []) as url:
        assert url == "http://127.0.0.1:1"
