"""The server's log: its formats, the lines for each stage of a model's life, and what happens if the log's reader blocks."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from deploy.logs import MOST_LINES, JsonLines, TextLines, Writer
from server.http.record import REQUEST_ID
from tests.conftest import CommandLine, workers_of

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("server.x", logging.INFO, "x.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


@pytest.fixture
def of_a_request() -> Iterator[None]:
    token = REQUEST_ID.set("req-1")
    yield
    REQUEST_ID.reset(token)


def test_a_line_of_text_has_time_level_and_request(of_a_request: None) -> None:
    assert re.fullmatch(rf"{TIME} info    req-1 loading demo", TextLines().format(record("loading %s", "demo")))


def test_without_a_request_there_is_no_id() -> None:
    assert re.fullmatch(rf"{TIME} info    stopped", TextLines().format(record("stopped")))
    assert "request_id" not in json.loads(JsonLines().format(record("stopped")))


def test_a_line_of_json_is_one_object_with_the_fields_of_the_record(of_a_request: None) -> None:
    line = JsonLines().format(record("two\nlines", fields={"status": 200}))
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(TIME, found.pop("time"))
    assert found == {"level": "info", "logger": "server.x", "request_id": "req-1", "message": "two\nlines", "status": 200}


def test_an_exception_is_told_within_its_object() -> None:
    try:
        raise ValueError("the cause")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    assert "ValueError: the cause" in json.loads(JsonLines().format(made))["exception"]
    assert "ValueError: the cause" in TextLines().format(made)


class Blocked(io.StringIO):
    """A stream whose writes block until the test sets the event `reads`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()

    def write(self, text: str) -> int:
        self.reads.wait()
        return super().write(text)


def test_a_log_that_nobody_reads_blocks_nobody_and_counts_what_it_loses() -> None:
    stream = Blocked()
    writer = Writer(stream)
    writer.setFormatter(logging.Formatter("%(message)s"))
    for number in range(MOST_LINES + 100):
        writer.emit(record(str(number)))  # must return at once although nobody reads the log
    stream.reads.set()
    writer.flush()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "0" and len(lines) <= MOST_LINES + 2
    (lost,) = [line for line in lines if "dropped" in line]
    assert int(lost.split()[0]) in (99, 100)


def test_a_closed_log_ends_nothing(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    stream.close()
    writer = Writer(stream)
    writer.setFormatter(logging.Formatter("%(message)s"))
    for _ in range(3):
        writer.emit(record("x"))
    writer.flush()


class Exiting(io.StringIO):
    """A stream like the one that rich puts in the place of standard error while it shows bars: a broken pipe ends the program."""

    def write(self, text: str) -> int:
        raise SystemExit(1)


@pytest.mark.parametrize("stream", [None, Exiting()], ids=["none", "exiting"])
def test_a_line_that_cannot_be_written_does_not_end_the_log(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no standard error if that was closed before the start."""
    writer, later = Writer(), io.StringIO()
    writer.setFormatter(logging.Formatter("%(message)s"))
    for found in (stream, later):
        monkeypatch.setattr(sys, "stderr", found)
        writer.emit(record("x"))
        writer.flush()
    assert later.getvalue() == "x\n"


def test_a_model_s_life_has_lines_in_json(command_line: CommandLine) -> None:
    """With --log-format json, the log has a JSON object for each of these events: load, ready, a request, a killed worker, unload and
    stop."""
    command = ["relaxserve", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, env=command_line.environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[dict[str, Any]] = []

        def read_until(part: str) -> dict[str, Any]:
            while part not in lines[-1]["message"] if lines else True:
                line = server.stderr.readline()  # type: ignore[union-attr]
                assert line, f"the server ended: {lines}"
                lines.append(json.loads(line))
            return lines[-1]

        try:
            url = read_until("relaxserve at")["url"]
            assert any("loading demo" in line["message"] for line in lines)
            assert any(re.match(r"demo is ready after .* context \d+", line["message"]) for line in lines)
            body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]}).encode()
            headers = {"content-type": "application/json", "x-request-id": "my-own-id"}
            urlopen(Request(f"{url}/v1/chat/completions", body, headers)).close()
            answered = read_until("POST /v1/chat/completions")
            assert answered["request_id"] == "my-own-id" and answered["model"] == "demo" and answered["status"] == 200
            assert answered["prompt_tokens"] > 5 and answered["completion_tokens"] > 2 and answered["ms"] > 0
            (worker,) = workers_of(server.pid)
            os.kill(worker, signal.SIGKILL)
            assert read_until("died")["level"] == "warning"
            read_until("a new worker was ready")
            urlopen(Request(f"{url}/admin/models/demo", method="DELETE")).close()
            read_until("demo is unloaded and gave back")
        finally:
            server.terminate()
            _, rest = server.communicate(timeout=60)
        assert [json.loads(line)["message"] for line in rest.splitlines()][-2:] == ["stopping", "stopped"]
