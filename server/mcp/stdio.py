"""Speak MCP over the standard streams of a process: one message per line."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from server.mcp.attempt import Attempt
from server.mcp.errors import McpError, McpLost
from server.mcp.transport import Hear
from server.mcp.wire import MAX_MESSAGE_BYTES, MODERN, Message, Request, Traffic, notification, read_messages, reply_to, result_of

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR")
CLOSE_S = 2.0  # time for the process to end by itself, and then to end after SIGTERM
WRITE_S = 5.0  # time for which a pipe may stay full
TOLD_LINES = 3  # last lines of the process's error stream that an error shows


class StdioTransport:
    """A process that speaks MCP over its standard streams, and two threads that read its messages and its error stream. Of the
    client's environment, the process gets only the variables INHERITED, because others may be secrets."""

    keeps_open = True

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], hear: Hear) -> None:
        """Start the process. `hear` is called with each notification of the server. Raise McpLost if the process does not start."""
        self.version = MODERN
        self.hear = hear
        self._name = name
        own = {variable: os.environ[variable] for variable in INHERITED if variable in os.environ}
        pipe = subprocess.PIPE
        try:
            # The process gets a session of its own: then Ctrl-C at the terminal cancels a call, and does not end the server.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env={**own, **environment}, start_new_session=True
            )
        except OSError as error:
            raise McpLost(f"MCP server {name!r} does not start: {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._waiting: dict[int, queue.SimpleQueue[Message | McpError | None]] = {}  # request id -> its answer; None: cancelled
        self._lock = threading.Lock()  # guards `_waiting`, `_fault` and `_traffic`
        self._writing = threading.Lock()  # held while a message is written
        self._fault: McpError | None = None  # why no more messages come
        self._traffic = Traffic(name)
        self._said: deque[bytes] = deque(maxlen=TOLD_LINES)  # last lines of the error stream
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def exchange(self, request: Request, attempt: Attempt) -> Mapping[str, Any]:
        """Send a request and return its result. Raise McpError if there is no result. If no answer comes, also tell the server that nobody
        waits for one any more."""
        answers: queue.SimpleQueue[Message | McpError | None] = queue.SimpleQueue()
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._waiting[request.id] = answers
            self._traffic = Traffic(self._name)
        answer: Message | McpError | None = None
        try:
            self._write(request.encode(), attempt)
            with attempt.stopping(lambda: answers.put(None)), suppress(queue.Empty):
                answer = answers.get(timeout=attempt.remaining_s)
        finally:
            with self._lock:
                del self._waiting[request.id]
            if answer is None:
                self._cancel(request)
        if answer is None:
            raise attempt.fault(self._name)
        if isinstance(answer, McpError):
            raise answer
        return result_of(answer, self._name)

    def notify(self, message: bytes, attempt: Attempt) -> None:
        """Send a message that has no answer. Raise McpError if the server does not read its input, or has ended."""
        self._write(message, attempt)

    def close(self) -> None:
        """End the process: close its input, and send it signals if it does not end by itself. Kill the processes that are left in its
        group."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with suppress(OSError):
            process.stdin.close()
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, end)  # the process and those that it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_S)
                break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for thread, stream in zip(self._threads, (process.stdout, process.stderr), strict=True):
            thread.join(CLOSE_S)
            if not thread.is_alive():  # if a process outside the group still has the stream open, `close` would never return
                stream.close()

    def _cancel(self, request: Request) -> None:
        """Tell the server that nobody waits for an answer any more. Errors are ignored."""
        with suppress(McpError):
            told = notification("notifications/cancelled", {"requestId": request.id, "reason": "the client waits no longer"})
            self._write(told, Attempt(WRITE_S))

    def _write(self, message: bytes, attempt: Attempt) -> None:
        """Write a line. Raise McpError if the pipe stays full because the server does not read, or if the process has ended."""
        assert self._process.stdin is not None
        rest = memoryview(message + b"\n")
        with self._writing:
            try:
                fd = self._process.stdin.fileno()
                while rest:
                    if not select.select([], [fd], [], min(attempt.remaining_s, WRITE_S))[1]:
                        raise McpLost(f"MCP server {self._name!r} does not read its input")
                    rest = rest[os.write(fd, rest) :]
            except (OSError, ValueError) as error:
                raise self._fault or McpLost(f"MCP server {self._name!r} has ended{self._last_words()}") from error

    # --- the threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read messages until the process ends, or sends something that is not valid. Then fail all requests that wait."""
        assert self._process.stdout is not None
        try:
            while line := self._process.stdout.readline(MAX_MESSAGE_BYTES + 1):
                if len(line) > MAX_MESSAGE_BYTES:
                    raise McpLost(f"MCP server {self._name!r} sent a line of more than {MAX_MESSAGE_BYTES >> 20} MiB")
                messages = read_messages(line, self._name) if line.strip() else []
                with self._lock:
                    self._traffic.count(len(line), max(1, len(messages)))
                for message in messages:
                    self._take(message)
            self._threads[1].join(0.2)  # wait for the error stream, which usually says why the process has ended
            fault: McpError = McpLost(f"MCP server {self._name!r} has ended{self._last_words()}")
        except McpError as error:
            fault = error
        except (OSError, ValueError):
            fault = McpLost(f"MCP server {self._name!r} was closed")
        except Exception as error:  # requests must not wait for a thread that has ended
            fault = McpLost(f"a message of MCP server {self._name!r} cannot be read: {type(error).__name__}")
        with self._lock:
            self._fault = fault
            for answers in self._waiting.values():
                answers.put(fault)

    def _take(self, message: Message) -> None:
        """Pass an answer on to the request that waits for it, and a notification to `hear`. Answer a request of the server."""
        if "method" in message and "id" in message:
            with suppress(McpError):
                self._write(reply_to(message), Attempt(WRITE_S))
        elif "method" in message:
            self.hear(message)
        else:
            number = message.get("id")
            with self._lock:
                answers = self._waiting.get(number) if isinstance(number, int) else None
                self._traffic = Traffic(self._name)
            if answers is not None:
                answers.put(message)

    def _read_errors(self) -> None:
        """Keep the last lines of the error stream."""
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            while line := self._process.stderr.readline(1 << 12):
                self._said.append(line)

    def _last_words(self) -> str:
        """Return the end of what the process has written to its error stream, in the form of the end of an error message; "" if the process
        has written nothing."""
        said = b"".join(self._said).decode(errors="replace").strip()
        return f"; it said: {said[-600:]}" if said else ""
