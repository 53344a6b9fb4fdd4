"""Ollama's commands, on a server whose model computes nothing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.commands import app
from deploy.cli.running import call_of
from server.defaults import Defaults
from server.models.state import ModelSpec
from tests.server.conftest import serve  # noqa: F401  # a fixture


def run(server: Any, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--url", server.url], prog_name="relaxserve", env={"COLUMNS": "200"})


@pytest.fixture
def server(serve: Any) -> Any:  # noqa: F811
    return serve(initial=(ModelSpec("null", "null", defaults=Defaults(system="Be brief.", temperature=0.25)),))


def test_list_and_remove_are_ls_and_rm() -> None:
    for word, meaning in (
        ("list", "List the downloaded models"),
        ("images", "List the downloaded models"),
        ("remove", "Remove downloaded"),
        ("rmi", "Remove downloaded"),
    ):
        assert meaning in CliRunner().invoke(app, [word, "--help"], prog_name="relaxserve").output


def test_show_describes_a_model_with_its_defaults(server: Any) -> None:
    said = run(server, "show", "null").output
    for text in ("capabilities", "completion", "temperature 0.25", "Be brief.", "4,096 tokens"):
        assert text in said, said
    missing = run(server, "show", "nosuch")
    assert "model 'nosuch' is not loaded; loaded are: null" in str(missing.exception)


def test_cp_and_create_make_names(server: Any, tmp_path: Path) -> None:
    assert "null is also called gpt-4o-mini" in run(server, "cp", "null", "gpt-4o-mini").output
    file = tmp_path / "Modelfile"
    file.write_text('FROM null\nSYSTEM """Speak like\na pirate."""\nPARAMETER temperature 0.75\nPARAMETER stop Arr')
    assert "pirate is made from null" in run(server, "create", "pirate", "-f", str(file)).output
    shown = server.http().post("/api/show", json={"model": "pirate"}).json()
    assert shown["system"] == "Speak like\na pirate." and "Arr" in shown["parameters"]
    run(server, "create", "calm", "--from", "pirate", "--default", "temperature=0", "--default", "max_tokens=9")
    entry = server.http().get("/v1/models/calm").json()
    assert entry["sampling"]["temperature"] == 0 and entry["defaults"]["max_tokens"] == 9
    assert entry["defaults"]["system"] == "Speak like\na pirate."


def test_what_cannot_be_made_is_refused_in_one_line(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    for text, message in (
        ("FROM ./a.gguf", "model './a.gguf' is not loaded"),
        ("FROM null\nTEMPLATE {{ .Prompt", "template among the defaults is broken"),
        ("FROM null\nPARAMETER mirostat 1", "parameters has 'mirostat'"),
        ("FROM null\nADAPTER x", "line 2: ADAPTER is not supported"),
    ):
        file.write_text(text)
        said = run(server, "create", "x", "-f", str(file))
        assert said.exit_code and message in f"{said.output}{said.exception}".replace("\n", " "), said.output
    assert "cannot be read" in run(server, "create", "x", "-f", str(tmp_path / "none")).output
    both = run(server, "create", "x", "--from", "null", "-f", str(file)).output.replace("\n", " ")
    assert "--from and --file cannot be used together" in both
    assert "is 'warm'" in run(server, "create", "x", "--from", "null", "--default", "temperature=warm").output


def test_stop_frees_the_memory_until_the_next_request(server: Any) -> None:
    assert "null sleeps" in run(server, "stop", "null").output
    assert server.chat(model="null").status_code == 200
    assert "model 'nosuch' is not loaded" in str(run(server, "stop", "nosuch").exception)


@pytest.mark.parametrize(
    ("entry", "path", "asked"),
    [
        ({"chats": True, "generates": True}, "chat/completions", '"messages"'),
        ({"chats": False, "generates": True}, "completions", '"prompt"'),
        ({"chats": False, "generates": False, "embedding_size": 8}, "embeddings", '"input"'),
    ],
)
@pytest.mark.parametrize("has_key", [False, True])
def test_the_shown_call_asks_what_the_model_answers(entry: dict[str, Any], path: str, asked: str, has_key: bool) -> None:
    call = call_of({"id": "it's a model", **entry}, "http://localhost", has_key=has_key)
    assert call.startswith(f"curl http://localhost/v1/{path} ") and asked in call
    assert ('-H "Authorization: Bearer $RELAXSERVE_KEY"' in call) == has_key
    words = shlex.split(call)
    assert json.loads(words[-1])["model"] == "it's a model", "a shell reads the body as it is"


def test_a_model_that_answers_none_of_these_paths_has_no_call() -> None:
    assert call_of({"id": "classes", "chats": False, "generates": False, "embedding_size": None}, "http://localhost", has_key=False) == ""
