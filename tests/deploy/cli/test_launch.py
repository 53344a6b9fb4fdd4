"""`relaxserve launch` starts coding agents with settings of their own for a model of a running server."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from deploy.agents import AGENTS, Served
from deploy.cli import launch
from deploy.cli.launch import script, written
from deploy.client import Client
from server.settings import SettingsError

SERVED = Served("http://127.0.0.1:8000", "qwen", 32_768)
SECRET = "sk-secret-0123456789"
AGENT = """#!/bin/sh
echo "$@"
env
"""


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("key", [None, SECRET])
def test_settings_name_the_server_and_the_model_but_show_no_key(name: str, key: str | None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = AGENTS[name].settings(Served(SERVED.url, SERVED.model, SERVED.context, key))
    file = written(settings)
    everything = " ".join([*settings.arguments, *settings.environment.values(), settings.file])
    assert SERVED.url in everything and SERVED.model in everything
    assert (key or "unused") in everything or (name == "codex" and key is None)
    assert SECRET not in script(settings, [name, *settings.arguments], key), "nor in the arguments, which others can see"
    if file is not None:
        written_file = tmp_path / "relaxserve" / settings.file_name
        assert file == written_file or file in written_file.parents
        assert stat.S_IMODE(written_file.stat().st_mode) == 0o600 and json.loads(written_file.read_text())


@pytest.mark.parametrize("name", ["aider", "claude", "codex", "continue", "opencode"])  # the others have no such setting
def test_an_agent_knows_the_length_of_the_context(name: str) -> None:
    settings = AGENTS[name].settings(SERVED)
    everything = " ".join([*settings.arguments, *settings.environment.values(), settings.file])
    assert str(SERVED.context) in everything


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_an_agent_waits_for_the_first_token_of_a_long_prompt(name: str) -> None:
    """By default, both agents send a request again after 300 s without an event. A slow machine computes 19,000 tokens in more time."""
    settings = AGENTS[name].settings(SERVED)
    assert "1800000" in " ".join([*settings.arguments, *settings.environment.values()])


def test_a_file_of_an_earlier_start_is_replaced(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = AGENTS["continue"].settings(SERVED)
    file = written(settings)
    assert file is not None
    file.write_text("x" * 100_000)
    file.chmod(0o644)
    assert written(settings) == file and file.read_text() == settings.file + "\n" and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "relaxserve").write_text("no folder")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("continue", "cline"):
        message = f"{tmp_path}/relaxserve/.* cannot be written: (File exists|Not a directory); set XDG_CONFIG_HOME to a folder of this user"
        with pytest.raises(SettingsError, match=message):
            written(AGENTS[name].settings(SERVED))


def test_a_short_context_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Server(Client):
        def get(self, path: str) -> Any:
            return {"data": [{"id": "qwen", "aliases": ["coder"], "max_model_len": 4096}]}

    monkeypatch.setattr(launch, "Client", Server)
    launch.launch("claude", model="coder", show=True)
    told = capsys.readouterr()
    text = "claude begins with about 19,000 tokens, and the context of coder is 4,096: load the model with a larger max_context"
    assert text in told.err.replace("\n", " ") and "export ANTHROPIC_MODEL=coder\n" in told.out
    launch.launch("aider", model="qwen", show=True)
    assert capsys.readouterr().err == ""


@pytest.mark.xdist_group("demo server")
def test_an_installed_agent_starts_with_its_settings(demo_server: Any, tmp_path: Path) -> None:
    (tmp_path / "claude").write_text(AGENT)
    (tmp_path / "claude").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = demo_server.run("relaxserve", "launch", "claude", "--", "-p", "hi", PATH=path, XDG_CONFIG_HOME=str(tmp_path))
    assert "-p hi" in said and f"ANTHROPIC_BASE_URL={demo_server.url}" in said and "ANTHROPIC_MODEL=demo" in said


@pytest.mark.xdist_group("demo server")
def test_an_agent_that_is_not_installed_is_named_with_its_package(demo_server: Any, tmp_path: Path) -> None:
    missing = demo_server.run("relaxserve", "launch", "codex", status=1, PATH=str(tmp_path))
    assert "codex is not installed: no program 'codex' is in PATH; install it with `npm install -g @openai/codex`" in missing
    assert "no model 'nobody'; it has demo" in demo_server.run("relaxserve", "launch", "codex", "--model", "nobody", status=1)
    shown = demo_server.run("relaxserve", "launch", "codex", "--show")
    assert shown.splitlines()[-1].startswith("codex -c ") and 'wire_api="responses"' in shown
