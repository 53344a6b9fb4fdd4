"""MCP servers in `relaxserve chat`: how they are named, and how calls are shown, approved, cancelled and answered."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.attachments import sessions
from deploy.cli import models, tool_turns
from deploy.cli.chat import Talk, _answer_or_tell, chat
from deploy.cli.conversation import Conversation
from deploy.cli.tool_turns import CANCELLED, REFUSED, attached
from deploy.client import Client
from deploy.toolbox import Toolbox, _progress
from server.messages import Submit
from server.models.state import ModelSpec
from server.settings import SettingsError
from tests.doubles.mcp_server import Behaviour, serving
from tests.doubles.worker import NullScript
from tests.server.conftest import serve

__all__ = ["serve"]
COMMAND = f"env PYTHONPATH={Path(__file__).parents[3]} {sys.executable} -m tests.doubles.mcp_server modern"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


class Model:
    """Answers with scripted calls, then with a text."""

    def __init__(self, *turns: list[dict[str, Any]]) -> None:
        self.turns = list(turns)
        self.tools: list[dict[str, Any]] = []

    def __call__(self, tools: list[dict[str, Any]], calls: list[dict[str, Any]]) -> str:
        self.tools = tools
        if not self.turns:
            return "Done."
        calls += self.turns.pop(0)
        return ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of answers that the user gives. An answer with a lone surrogate arrives as bytes that are no text."""
    given: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda _question: given.pop(0).encode(errors="surrogateescape").decode())
    return given


def results(turns: list[dict[str, Any]]) -> list[str]:
    return [turn["content"] for turn in turns if turn["role"] == "tool"]


def test_calls_are_made_as_the_user_approves(terminal: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    terminal += ["what?", "\udcfc", "y", "n", "always"]
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    model = Model([call("add", a=1, b=2), call("fail")], [call("echo", text="\x1b[31mred")], [call("echo", text="again")])
    with attached([COMMAND], approves_all=False) as tools:
        tools.take(turns, model)
    assert results(turns) == ["3", REFUSED.text, "\x1b[31mred", "again"] and not terminal
    assert turns[-1] == {"role": "assistant", "content": "Done."} and turns[1]["tool_calls"][0]["id"] == "call_add"
    assert model.tools[0]["function"]["name"] == "add"
    shown = capsys.readouterr().err
    assert 'env: add {"a": 1, "b": 2}' in shown and "\x1b" not in shown and "\\u001b[31mred" in shown


def test_without_a_terminal_no_call_is_made(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for approves_all, expected in ((False, REFUSED.text), (True, "3")):
        turns: list[dict[str, Any]] = []
        with attached([COMMAND], approves_all=approves_all) as tools:
            tools.take(turns, Model([call("add", a=1, b=2)]))
        assert results(turns) == [expected]
    assert "--yes approves all calls" in capsys.readouterr().err


def test_an_interrupt_cancels_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    turns: list[dict[str, Any]] = []
    with attached([COMMAND], approves_all=True) as tools:
        monkeypatch.setattr(Toolbox, "call", interrupted)
        tools.take(turns, Model([call("wait")]))
    assert results(turns) == [CANCELLED.text] and turns[-1]["content"] == "Done."


def test_a_model_that_never_ends_is_stopped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_turns, "MAX_TURNS", 3)
    turns: list[dict[str, Any]] = []
    with attached([COMMAND], approves_all=True) as tools:
        tools.take(turns, Model(*([call("add", a=1, b=2)] for _ in range(9))))
    assert len(results(turns)) == 3 and "stopped after 3 turns" in capsys.readouterr().err


def test_bad_calls_and_servers_are_told(stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    url = stack.enter_context(serving(Behaviour()))
    turns: list[dict[str, Any]] = []
    bad = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[1"}}
    with attached(["/no/such/program", url], approves_all=True) as tools:
        tools.take(turns, Model([bad, call("nothing"), call("rubbish")]))
    assert results(turns)[0] == "the arguments are '[1'; expected a JSON object" and results(turns)[1] == "there is no tool nothing"
    assert "not JSON" in results(turns)[2]
    assert "MCP server 'program' does not start" in capsys.readouterr().err


FILE = {
    "mcpServers": {
        "local": {"command": sys.executable, "args": ["-m", "${MODULE}", "legacy"], "env": {"PYTHONPATH": "${env:PWD}"}},
        "remote": {"type": "http", "url": "{url}", "headers": {"X-Key": "${SECRET}"}},
    }
}


def test_files_of_other_programs_are_read(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = Behaviour()
    url = stack.enter_context(serving(behaviour))
    monkeypatch.setenv("MODULE", "tests.doubles.mcp_server")
    monkeypatch.setenv("PWD", str(Path(__file__).parents[3]))
    monkeypatch.setenv("SECRET", "hush")
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps(FILE).replace("{url}", url))
    turns: list[dict[str, Any]] = []
    with attached([str(path)], approves_all=True) as tools:
        tools.take(turns, Model([call("add", a=1, b=2), call("remote_add", a=3, b=4)]))
    assert results(turns) == ["3", "7"] and behaviour.headers[-1]["x-key"] == "hush"


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "has no mcpServers"),
        ('{"mcpServers": {"a": {}}}', "a in .* has neither a command nor a url"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "args of a"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}', "env of a"),
        ('{"mcpServers": {"a": {"url": "https://[::1", "headers": {}}}}', r"address of MCP server 'a' is 'https://\[::1'"),
        ('{"mcpServers": {"a": {"url": "https://a", "headers": {"x-key": "one\\n"}}}}', "value for x-key that no header can carry"),
        ('{"mcpServers": {"a": {"url": "https://a", "headers": {"x key": "one"}}}}', "'x key', which is no name of a header"),
        ('{"servers": {"a": {"command": "${NO_SUCH_VARIABLE}"}}}', "needs the variable NO_SUCH_VARIABLE"),
        ('{"servers": {"a": {"command": "${input:key}"}}}', "only an editor can replace"),
    ],
)
def test_bad_files_are_refused_by_name(document: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(document)
    with pytest.raises(SettingsError, match=told):
        sessions([str(path)])


@pytest.mark.parametrize("text", ["", "'unclosed", "http://", "https://[::1", "http://[x]/mcp"])
def test_bad_names_of_servers_are_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        sessions([text])


def test_servers_of_one_name_are_numbered() -> None:
    assert [one.name for one in sessions(["python a", "/usr/bin/python b", "https://example.com/mcp"])] == [
        "python",
        "python2",
        "example.com",
    ]


def test_servers_of_one_file_are_numbered_past_each_other(tmp_path: Path) -> None:
    """An approval of all calls of a tool counts for the server's name, so no two servers may have the same."""
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {name: {"command": name} for name in ("a", "a2")}}))
    assert [one.name for one in sessions(["a", str(path), str(path)])] == ["a", "a2", "a22", "a3", "a23"]


def test_an_approval_of_no_tools_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--yes is set, and --mcp is not"):
        chat("What is 2 plus 3?", yes=True, mcp=None)


def test_run_refuses_it_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "model_spec", lambda _model: pytest.fail("the model is looked for"))
    with pytest.raises(typer.BadParameter, match="--yes is set, and --mcp is not"):
        models.run(model="smollm2", question="What is 2 plus 3?", yes=True, mcp=None)


def test_a_question_is_answered_with_tools(serve: Any, capsys: pytest.CaptureFixture[str], stack: ExitStack) -> None:
    """The question goes from the command to the model and the MCP server, and the answer comes back."""

    def answer(submit: Submit, _choice: int) -> list[list[int]]:
        prompt = bytes(i for i in submit.prompt_ids if i < 256).decode()
        said = "Five." if "<|tool|>5" in prompt else '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        return [[byte] for byte in said.encode()]

    server = serve(script=NullScript(answer=answer), initial=(ModelSpec("null", "null", tool_parser="hermes"),))
    chat("What is 2 plus 3?", None, None, None, None, None, [COMMAND], yes=True, url=server.url, key=None)
    shown = capsys.readouterr()
    assert shown.out == "\nFive.\n" and 'env: add {"a": 2, "b": 3}' in shown.err


def test_an_interrupt_while_tools_are_listed_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may take a minute to start."""

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    conversation = Conversation(Client("http://127.0.0.1:1", ""), "demo")
    conversation.turns.append({"role": "user", "content": "earlier"})
    with attached([COMMAND], approves_all=True) as tools:
        monkeypatch.setattr(Toolbox, "offered", interrupted)
        _answer_or_tell("hello", Talk(conversation, {}, tools))
    assert conversation.turns == [{"role": "user", "content": "earlier"}]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"progress": 1, "total": 2, "message": "half"}, "1 of 2, half"),
        ({"progress": 10**400, "total": 10**400, "message": "much"}, "much"),
        ({"progress": "1", "total": None}, ""),
    ],
    ids=["plain", "huge", "no numbers"],
)
def test_progress_that_cannot_be_shown_is_left_out(told: dict[str, Any], shown: str) -> None:
    assert _progress(told) == shown
