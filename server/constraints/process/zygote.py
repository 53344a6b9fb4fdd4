"""The worker's handle to the zygote (`server.constraints.process.main`). The zygote is started at first use, and restarted if it has
ended."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from runtime.launch import command
from server.constraints.matcher import ConstraintLost
from server.constraints.process.process_socket import ProcessSocket
from server.constraints.process.wire import GrammarSettings

COMMAND = command("server.constraints.process.main")

log = logging.getLogger(__name__)


class Zygote:
    """The zygote of one model, from which the processes of its grammars are forked."""

    def __init__(self, settings: GrammarSettings, read_tokenizer: Callable[[], bytes]) -> None:
        """`read_tokenizer` returns the content of tokenizer.json. A separate thread calls `read_tokenizer` when it first starts the zygote.
        If the call fails, later starts repeat it."""
        self._settings = settings
        self._read_tokenizer: Callable[[], bytes] | None = read_tokenizer  # None: it has been read
        self._tokenizer_json: bytes | None = None  # tokenizer.json that has been read, but not yet written to `_settings_fd`
        self._settings_fd = os.memfd_create("constraint-settings")  # holds the settings and tokenizer.json, for every start
        # Starting a process takes milliseconds, so a thread does it. The thread lives on, because the kernel ends the zygote when the
        # thread that started it ends.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="zygote")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: ProcessSocket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the zygote on a thread, unless it runs or was closed for good. Raise OSError if this process has no free descriptors
        now."""
        if self._socket is not None and self._socket.has_ended:
            self.kill()
        if self._socket is None and not self._is_closed:
            near, far = socket.socketpair()
            self._socket = ProcessSocket(near)
            self._starter.submit(self._start, far, self._socket)

    def open_child(self) -> ProcessSocket:
        """Fork a child of the zygote, and return the socket to the child. Raise ConstraintLost if the zygote was closed, or OSError if
        this process has no free descriptors now."""
        self.start()
        if self._socket is None:
            raise ConstraintLost("the model is being unloaded")
        return self._socket.open_child()

    def kill(self) -> None:
        """Kill the zygote and all its descendants, if it was started. The next `start` or `open_child` starts a new one."""
        process, self._process, self._socket = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the zygote for good. This waits for a start that is in progress. Do nothing if it was closed before."""
        if self._is_closed:
            return
        self._is_closed = True
        self._starter.shutdown()
        self.kill()
        os.close(self._settings_fd)

    def _start(self, far: socket.socket, own: ProcessSocket) -> None:
        """Start the process, with `far` as its standard input, and note its pid in `own`. If that fails, `own` receives `ENDED`, because
        `far` is closed. This runs on a thread of its own."""
        arguments = str(self._settings_fd), str(os.getpid())
        with far, suppress(OSError):  # if no process can be started, closing `far` makes the socket receive `ENDED`
            try:
                self._provide_tokenizer()
            except Exception:
                log.exception("the tokenizer of the constraints cannot be provided; the next start tries again")
                return
            # The process gets its own process group, so that signals from the terminal reach only the server.
            self._process = subprocess.Popen((*COMMAND, *arguments), stdin=far.fileno(), pass_fds=[self._settings_fd], process_group=0)
            own.pid = self._process.pid

    def _provide_tokenizer(self) -> None:
        """Read the tokenizer, unless an earlier start has read it, and write it into the file that processes read. If writing fails, keep
        it for the next start."""
        if self._read_tokenizer is not None:
            self._tokenizer_json, self._read_tokenizer = self._read_tokenizer(), None
        if self._tokenizer_json is not None:
            self._write(self._tokenizer_json)
            self._tokenizer_json = None

    def _write(self, tokenizer_json: bytes) -> None:
        """Write the settings and the tokenizer into the file that processes read."""
        os.ftruncate(self._settings_fd, 0)
        with open(self._settings_fd, "wb", closefd=False) as file:
            file.seek(0)
            file.write(msgspec.msgpack.encode((self._settings, tokenizer_json)))
