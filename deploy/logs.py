"""The log of a process on standard error: text lines for people, or one JSON object per line for programs.

2026-11-23T09:30:01.250Z info    req-5f3a POST /v1/chat/completions 200 35 ms, from 10.0.0.7, model demo, 12 + 8 tokens, ...
{"time": "2026-11-23T09:30:01.250Z", "level": "info", "request_id": "req-5f3a", "message": "...", "status": 200, ...}
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import TextIO

from server.http.record import REQUEST_ID

OURS = ("server", "deploy", "compiler", "runtime")
MOST_LINES = 10_000  # maximum number of lines that wait to be written; further lines are dropped
FLUSH_S = 1.0  # seconds to wait for the writer when the process ends


def configure(level: str, form: str) -> None:
    """Set up the log of this process, and remove its former handlers. `form` is json or text. Lines of our own modules below `level` are
    dropped, and lines of libraries below `level` or below warning. Python's warnings go to the log, too."""
    writer = Writer()
    writer.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(max(logging.WARNING, level_number(level)))
    for name in OURS:
        logging.getLogger(name).setLevel(level_number(level))
    logging.captureWarnings(True)


def level_number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


class TextLines(logging.Formatter):
    """Write a record as a line of text, followed by the traceback of its exception if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        line = f"{_time(record)} {record.levelname.lower():7} {f'{request_id} ' if request_id else ''}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Write a record as one JSON object. The attribute `fields` of a record holds further fields, such as those of the access log."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        fields["message"] = record.getMessage()
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class Writer(logging.Handler):
    """Write the log on a separate thread, so that a slow or absent reader of the log delays no request. A line that comes while MOST_LINES
    wait is dropped and counted. Later, a line in the log states how many were dropped."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Start the thread. It writes to `stream`, or to standard error if that is None."""
        super().__init__()
        self._stream = stream
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._num_lost = 0
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)  # format on the caller's thread: arguments may change later, and the request id belongs to this task
        except Exception:
            self.handleError(record)
            return
        if self._lines.qsize() < MOST_LINES:
            self._lines.put(line)
        else:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all lines are written, but no longer than FLUSH_S."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_S)

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            lost, self._num_lost = self._num_lost, 0
            self._write(line)
            if lost:
                self._write(f"{lost} lines of the log were dropped, because its reader was too slow")

    def _write(self, line: str) -> None:
        try:
            stream = self._stream or sys.stderr  # look up sys.stderr for each line, because a progress bar may replace it
            stream.write(f"{line}\n")
            stream.flush()
        # The thread goes on in any case. Nothing can be logged, because the log itself cannot be written. There may be no standard error,
        # and rich, which replaces it while it shows bars, exits if a pipe is broken.
        except (Exception, SystemExit):
            pass


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"
