"""The interactive chat in a terminal: its commands, its input lines, and its history."""

from __future__ import annotations

import builtins
import errno
import io
import json
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.cli import line_editor
from deploy.cli.chat import Talk, _talk, write
from deploy.cli.conversation import COMMANDS, CommandError, Conversation
from deploy.client import Client
from tests.disk import room_for
from tests.terminal import PROMPT, terminal

MODELS = [
    {"id": "demo", "aliases": ["tiny"], "generates": True},
    {"id": "tiny", "aliases": [], "generates": True},  # an alias with defaults of its own has an entry, too
    {"id": "minilm", "aliases": [], "generates": False},
]


class Server:
    """A fake client of the server. It has the methods that a conversation calls."""

    def get(self, path: str) -> Any:
        assert path == "/v1/models"
        return {"data": MODELS}


@pytest.fixture
def talk() -> Conversation:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    return Conversation(Server(), "demo", "Be short.", turns)  # type: ignore[arg-type]


def test_help_lists_every_command(talk: Conversation) -> None:
    said = talk.obey("/help")
    assert all(command.usage in said for command in COMMANDS.values())


def test_models_are_listed_and_chosen_by_name_or_alias(talk: Conversation) -> None:
    assert talk.obey("/model") == "* demo\n  tiny"
    talk.obey("/model tiny")
    assert talk.model == "tiny"
    with pytest.raises(CommandError, match=r"no model that can chat is named 'minilm'; those that can: demo, tiny$"):
        talk.obey("/model minilm")


def test_the_system_message_comes_first_and_can_be_removed(talk: Conversation) -> None:
    talk.obey("/system Answer in French.")
    assert talk.messages[0] == {"role": "system", "content": "Answer in French."}
    talk.obey("/system")
    assert talk.messages[0]["role"] == "user"


def test_clear_keeps_the_system_message_alone(talk: Conversation) -> None:
    talk.obey("/clear")
    assert talk.messages == [{"role": "system", "content": "Be short."}]


def test_a_conversation_is_saved_as_a_request(talk: Conversation, tmp_path: Path) -> None:
    said = talk.obey(f"/save {tmp_path / 'talk.json'}")
    assert "talk.json" in said
    assert json.loads((tmp_path / "talk.json").read_text()) == {"model": "demo", "messages": talk.messages}
    with pytest.raises(CommandError, match="exists; name another file"):
        talk.obey(f"/save {tmp_path / 'talk.json'}")
    with pytest.raises(CommandError, match="cannot be written"):
        talk.obey(f"/save {tmp_path / 'no' / 'talk.json'}")
    with pytest.raises(CommandError, match="cannot be written"):
        talk.obey("/save ~no-such-user/talk.json")
    with pytest.raises(CommandError, match="needs the name of a file"):
        talk.obey("/save")


def test_a_file_without_room_for_the_conversation_is_removed(talk: Conversation, tmp_path: Path) -> None:
    """Otherwise a part of the conversation would look like the whole, and the same name could not be saved once there is room."""
    with room_for(10), pytest.raises(CommandError, match="cannot be written: File too large"):
        talk.obey(f"/save {tmp_path / 'talk.json'}")
    assert not (tmp_path / "talk.json").exists()


def test_a_disk_that_is_full_only_when_the_file_is_closed_keeps_no_file(
    talk: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode))
    with pytest.raises(CommandError, match="cannot be written: No space left on device"):
        talk.obey(f"/save {tmp_path / 'talk.json'}")
    assert not (tmp_path / "talk.json").exists()


def test_bytes_that_are_no_text_are_saved_as_the_server_gets_them(talk: Conversation, tmp_path: Path) -> None:
    """A terminal in another encoding sends bytes that Python keeps as lone surrogates."""
    talk.obey("/system gr\udcfcn, \u65e5\u672c")
    talk.obey(f"/save {tmp_path / 'talk.json'}")
    content = (tmp_path / "talk.json").read_bytes().decode()
    assert json.loads(content)["messages"] == talk.messages and "\u65e5\u672c" in content


def test_an_unknown_command_names_the_nearest(talk: Conversation) -> None:
    with pytest.raises(CommandError, match="/modle is not a command \\(is /model meant\\?\\); /help lists them"):
        talk.obey("/modle x")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def given(*lines: str | BaseException | type[BaseException]) -> None:
        coming = iter(lines)

        def read(_prompt: str) -> str:
            line = next(coming)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)

    return given


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two \\", "three"], "one \ntwo \nthree"),
        (['"""', "def f():", "    return 1", '"""'], "def f():\n    return 1"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one line"""'], "one line"),
    ],
)
def test_lines_become_a_message(lines: list[str], message: str, typed: Callable[..., None]) -> None:
    typed(*lines)
    assert line_editor.ask() == message


def test_an_interrupt_gives_up_the_line_and_the_end_leaves(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    typed(KeyboardInterrupt, "hello", KeyboardInterrupt, EOFError)
    assert line_editor.ask() == "hello" and line_editor.ask() is None
    assert capsys.readouterr().err.count("Ctrl-C again or Ctrl-D leaves") == 2


def test_a_line_that_is_no_text_is_asked_for_again(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    typed(UnicodeDecodeError("utf-8", b"gr\xfcn", 2, 3, "invalid start byte"), "green")
    assert line_editor.ask() == "green"
    assert "the line is no text in UTF-8; write it again" in capsys.readouterr().err


def test_a_second_interrupt_in_a_row_leaves(typed: Callable[..., None]) -> None:
    typed(KeyboardInterrupt, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        line_editor.ask()


def spoken(kind: str, numbers: range) -> list[dict[str, Any]]:
    """Return events with a token each; the usage counts the tokens so far."""
    return [{"choices": [{"delta": {kind: "x"}}], "usage": {"completion_tokens": number}} for number in numbers]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (spoken("content", range(1, 42)), "41 tokens, 40 tokens/s"),
        (spoken("reasoning_content", range(1, 500)) + spoken("content", range(500, 521)), "520 tokens, 20 tokens/s"),
        (spoken("reasoning_content", range(1, 500)), "499 tokens"),
        (spoken("content", range(1, 2)), ""),
    ],
)
def test_the_speed_is_that_of_the_tokens_after_the_first_text(
    events: list[dict[str, Any]], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer takes a second from its first text on. Thoughts that come before it, and calls of tools, are not shown."""
    times = [100.0]

    class Thinking(Client):
        def events(self, method: str, path: str, body: Any = None) -> Iterator[Any]:
            assert body["stream_options"]["continuous_usage_stats"]
            yield from events
            times[0] = 101.0

    monkeypatch.setattr("deploy.cli.chat.time.monotonic", lambda: times[0])
    usage: dict[str, int] = {}
    write(Thinking("http://127.0.0.1:1").chat("m", [], told=usage.update), usage)
    assert capsys.readouterr().err.strip() == told


@pytest.mark.xdist_group("demo server")
def test_a_conversation_tells_its_speed_and_keeps_its_history(demo_server: Any, tmp_path: Path) -> None:
    with terminal(["relaxserve", "chat"], {**demo_server.environment, "XDG_STATE_HOME": str(tmp_path)}) as chat:
        chat.until(PROMPT)
        chat.write("What is the capital of France?\n")
        said = chat.until(PROMPT)
        assert "Paris" in said and re.search(r"\d+ tokens, \d+ tokens/s", said)
        chat.write("/model\n")
        assert "* demo" in chat.until(PROMPT)
        chat.write("/nothing\n")
        assert "error: /nothing is not a command" in chat.until(PROMPT)
        chat.write("\x04")
        assert chat.ended() == 0
    history = tmp_path / "relaxserve" / "chat_history"
    assert history.read_text().splitlines()[:2] == ["What is the capital of France?", "/model"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_question_on_standard_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, talk: Conversation) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG\r\n\xff"), encoding="utf-8"))
    with pytest.raises(typer.BadParameter, match="standard input is no text; expected a question in UTF-8"):
        _talk(Talk(talk, {}), None)
