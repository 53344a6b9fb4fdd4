"""Offer this machine for stages of models: accept workers that know the secret, and start the process of a stage for each."""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress

from deploy.stages.starting import start_process
from server.interfaces import LoadError
from server.signal_names import describe_status
from server.stages.handshake import HandshakeFailed, welcome
from server.stages.link import Link, StageLost
from server.stages.messages import Ended
from server.workers.worker_process import FROM_OUTSIDE

POLL_S = 0.2
PATIENCE_S = 3.0  # seconds for a stage to end after its worker has
MOST_STRANGERS = 32  # most connections that have not introduced themselves

log = logging.getLogger(__name__)


def offer(listener: socket.socket, secret: str) -> None:
    """Serve stages until this process ends. The kernel then ends the stages, too."""
    strangers = Strangers()
    while True:
        try:
            connection, address = listener.accept()
        except OSError as error:  # no file descriptor is left for now, or the connection has ended already
            log.warning("a connection is not accepted: %s", error.strerror or error)
            time.sleep(POLL_S)
            continue
        name = f"{address[0]} port {address[1]}"
        strangers.admit(connection)
        try:
            threading.Thread(target=_receive, args=(connection, name, secret, strangers), name=name, daemon=True).start()
        except RuntimeError as error:  # no thread is left for now
            log.warning("a connection from %s is refused: %s", name, error)
            strangers.forget(connection)
            connection.close()


class Strangers:
    """Connections that have not introduced themselves. If there are too many, the oldest one ends: a worker introduces itself at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[socket.socket, None] = {}  # the oldest first

    def admit(self, connection: socket.socket) -> None:
        """Count a connection among the strangers. If there are too many, end the oldest one."""
        with self._lock:
            if len(self._held) >= MOST_STRANGERS:
                oldest = next(iter(self._held))
                del self._held[oldest]
                with suppress(OSError):  # the connection has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            self._held[connection] = None

    def forget(self, connection: socket.socket) -> None:
        """Count a connection no more: it has introduced itself, or has ended."""
        with self._lock:
            self._held.pop(connection, None)


def _receive(connection: socket.socket, name: str, secret: str, strangers: Strangers) -> None:
    """Start a stage for the worker behind a connection if it knows the secret, and wait until the stage has ended."""
    try:
        try:
            welcome(connection, secret)
            connection.settimeout(None)
        finally:
            strangers.forget(connection)
        _, process = start_process(connection)
    except (HandshakeFailed, OSError, LoadError) as error:
        log.warning("a connection from %s is refused: %s", name, error)
        connection.close()
        return
    log.info("process %d serves a stage for %s", process.pid, name)
    try:
        how = _watch(connection, process)
    finally:
        connection.close()
    log.info("process %d, which served a stage for %s, has ended: %s", process.pid, name, how)


def _watch(connection: socket.socket, process: subprocess.Popen[bytes]) -> str:
    """Wait until the process of a stage ends. Return how it ended, and tell its worker. If the worker is gone, end the process."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    gone_s: float | None = None
    while process.poll() is None:
        if gone_s is None and poll.poll(POLL_S * 1000):
            gone_s = time.monotonic()
            poll.unregister(connection)
        elif gone_s is not None:
            time.sleep(POLL_S)
            if time.monotonic() - gone_s > PATIENCE_S:
                process.kill()
                process.wait()
    status = process.wait()
    how = describe_status(status)
    if gone_s is None:
        with suppress(StageLost):
            Link(connection, "the worker").send(Ended(how, from_outside=-status in FROM_OUTSIDE))
    return how
