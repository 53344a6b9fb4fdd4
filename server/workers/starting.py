"""Start the process of a worker, with a socket to the front.

A worker imports as many modules as the front, which takes time. So the command line starts a process before its own imports, when the model
is not known yet, and the first worker that the front opens uses this process. This module imports little, so that the process starts early.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started, and its socket."""

    command: tuple[str, ...]
    process: subprocess.Popen[bytes]
    connection: socket.socket  # the front's end of the socket

    def discard(self) -> None:
        """Kill the process, which is not needed."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


_ahead: list[Started] = []  # processes that wait for their first message


def start(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Started:
    """Start `command` with the file descriptor of a connected socket as its last argument. A socket pair has no name in the file system, so
    nothing is left behind if this process is killed. Raise OSError or MemoryError if the process cannot be started."""
    near, far = socket.socketpair()
    try:
        with far:
            # The process gets its own process group, so that an interrupt typed at the terminal reaches only the front. It stays in the
            # front's session: Linux (autogroup) divides the CPU time of a busy machine equally between sessions, so a front in another
            # session could wait up to 0.3 s for its share.
            words = [*command, str(far.fileno())]
            process = subprocess.Popen(words, env=environment, pass_fds=(far.fileno(),), process_group=0)
    except BaseException:
        near.close()
        raise
    return Started(tuple(command), process, near)


def start_ahead(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a process for the first worker that is opened with this command. If the process cannot be started, do nothing: the worker
    starts one when it is opened."""
    try:
        _ahead.append(start(command, environment))
    except (OSError, MemoryError):
        return
    atexit.register(_discard_all)


def take(command: Sequence[str]) -> Started | None:
    """Return a process that was started ahead with this command. Return None if there is none, or if it has ended. Each process is returned
    only once."""
    for started in _ahead:
        if started.command == tuple(command):
            _ahead.remove(started)
            if started.process.poll() is None:
                return started
            started.discard()
            return None
    return None


def _discard_all() -> None:
    """Kill the processes that no worker has used."""
    while _ahead:
        _ahead.pop().discard()
