"""Connections to a machine that falls silent break, whichever direction is lost, and whether they are idle or not. So do connections to
a program that does not read."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from subprocess import PIPE

import pytest

from server.lost_machines import notice_loss
from tests.network import Machine, can_cut, other_machine

needs_network = pytest.mark.skipif(not can_cut(), reason="may not make a network of its own, which tests cut")

ECHO = """
import socket, sys, threading
listener = socket.create_server((sys.argv[1], 7000))
print(flush=True)
def echo(connection):
    while data := connection.recv(100):
        connection.sendall(data)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""
WITHIN_S = 1.0
PATIENCE_S = 60.0  # the test's own; a broken kernel timer would take 15 minutes


@contextmanager
def echo() -> Generator[Machine]:
    """Return another machine that sends back what it gets at port 7000."""
    with other_machine() as machine, subprocess.Popen([*machine.inside, sys.executable, "-c", ECHO, machine.far], stdout=PIPE) as far:
        assert far.stdout is not None
        far.stdout.readline()
        try:
            yield machine
        finally:
            far.kill()


@needs_network
@pytest.mark.parametrize(
    "lost", [{}, {"to_near": False}, {"to_far": False}], ids=["both directions", "what is sent", "what would be received"]
)
def test_a_connection_breaks(lost: dict[str, bool]) -> None:
    with echo() as machine, ExitStack() as opened:
        idle, busy = (opened.enter_context(socket.create_connection((machine.far, 7000), PATIENCE_S)) for _ in range(2))
        for connection in (idle, busy):
            notice_loss(connection, WITHIN_S)
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
        machine.cut(**lost)
        began_s = time.monotonic()
        busy.sendall(b"y")
        for connection in (busy, idle):
            with pytest.raises(OSError, match="timed out"):
                connection.recv(1)
        assert time.monotonic() - began_s < PATIENCE_S / 2, "the kernel broke them, and not the patience of this test"


@needs_network
def test_a_connection_outlives_a_short_loss() -> None:
    with echo() as machine, socket.create_connection((machine.far, 7000), PATIENCE_S) as connection:
        notice_loss(connection, PATIENCE_S)
        machine.cut()
        connection.sendall(b"y")
        time.sleep(0.5)
        machine.mend()
        assert connection.recv(1) == b"y"


@pytest.fixture
def connected() -> Generator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection on this machine, with small buffers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with socket.create_connection(listener.getsockname(), PATIENCE_S) as near, listener.accept()[0] as far:
            yield near, far


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts this")
def test_a_connection_to_a_program_that_does_not_read_breaks(connected: tuple[socket.socket, socket.socket]) -> None:
    """The kernel of the other end acknowledges all probes of the closed window, and the connection breaks all the same."""
    near, _ = connected
    notice_loss(near, WITHIN_S)
    began_s = time.monotonic()
    with pytest.raises(OSError, match="Connection timed out"):
        while True:
            near.sendall(bytes(1 << 20))
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_an_idle_connection_to_a_program_that_does_not_read_stays(connected: tuple[socket.socket, socket.socket]) -> None:
    """The connection stays because no bytes wait to be sent."""
    near, far = connected
    notice_loss(near, WITHIN_S)
    near.sendall(b"x")
    time.sleep(3 * WITHIN_S)
    far.sendall(far.recv(1))
    assert near.recv(1) == b"x"
