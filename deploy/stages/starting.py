"""Start a stage: as a process of this machine, or through a host that offers itself."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field

from deploy.bound import bound
from runtime.launch import command
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.signal_names import describe_status
from server.stages.handshake import HandshakeFailed, TurnedAway, introduce
from server.stages.link import Link
from server.stages.places import Place
from server.workers.worker_process import FROM_OUTSIDE

CONNECT_S = 10.0
AGAIN_S = 0.2  # seconds before a host that turned this worker away is asked again
ENDS_S = 2.0  # seconds from the end of a connection to the end of its process


@dataclass(slots=True)
class Peer:
    """A stage that has been started, and the connection to it."""

    place: Place
    link: Link
    process: subprocess.Popen[bytes] | None = field(default=None)  # if it is a process of this machine

    def end(self) -> None:
        """Close the connection. Kill the stage's process if it runs on this machine."""
        self.link.shut()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.link.close()


def start_stage(place: Place, secret: str, number: int) -> Peer:
    """Start a stage. `secret` proves to another machine that it may start one; `number` counts the stages. If a machine turns this worker
    away, ask it again, for up to CONNECT_S seconds. Raise LoadError if the stage cannot be started."""
    name = f"stage {number} ({place.name})"
    if place.host is None:
        connection, process = start_process()
        return Peer(place, Link(connection, name, lambda: end_of(process)), process)
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return Peer(place, Link(_introduced(place.host, place.port, secret), name))
        except OSError as error:
            text = f"{name} cannot be reached: {error.strerror or error}"
            remedy = "run `relaxserve stage --listen` there, or name another host in stages"
            raise LoadError(ErrorCode.LOAD_FAILED, f"{text}; {remedy}") from error
        except HandshakeFailed as error:
            if not isinstance(error, TurnedAway) or time.monotonic() > end_s:
                raise LoadError(ErrorCode.LOAD_FAILED, f"{name} was reached, but {error}") from error
            time.sleep(AGAIN_S)


def _introduced(host: str, port: int, secret: str) -> socket.socket:
    """Connect to a host, and prove that this worker knows the secret. Raise OSError if the host cannot be reached, and HandshakeFailed if
    it refuses."""
    connection = socket.create_connection((host, port), CONNECT_S)
    try:
        introduce(connection, secret)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def end_of(process: subprocess.Popen[bytes]) -> tuple[str, bool] | None:
    """Return how a process that has closed its connection ended, and whether no request can be the cause. Return None if it still runs."""
    try:
        status = process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        return None
    return describe_status(status), -status in FROM_OUTSIDE


def start_process(inherited: socket.socket | None = None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process of a stage, which ends with this one, and return a connection to it. If a connection is given, the process serves
    that one, and it is returned. Raise LoadError if the process cannot be started; the connection is then closed."""
    try:
        near, far = (inherited, inherited) if inherited is not None else socket.socketpair()
    except OSError as error:
        raise _not_started(error) from error
    words = bound((*command("deploy.stages.process"), str(far.fileno())))
    try:
        # Stages that a worker starts are in its process group, which the front kills as a whole. Each stage that a host starts is in a
        # group of its own, which gets no signals of the host's terminal.
        group = None if inherited is None else 0
        process = subprocess.Popen(words, pass_fds=(far.fileno(),), stdin=subprocess.DEVNULL, process_group=group)
    except OSError as error:
        with suppress(OSError):
            near.close()
        raise _not_started(error) from error
    finally:
        if inherited is None:
            far.close()
    return near, process


def _not_started(error: OSError) -> LoadError:
    return LoadError(ErrorCode.LOAD_FAILED, f"the process of a stage cannot be started: {error.strerror}")
