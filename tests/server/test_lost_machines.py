"""Connections to a machine that falls silent break, whichever direction is lost, and whether they are idle or not."""

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

pytestmark = pytest.mark.skipif(not can_cut(), reason="only root can cut the network between two machines")

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


def test_a_connection_outlives_a_short_loss() -> None:
    with echo() as machine, socket.create_connection((machine.far, 7000), PATIENCE_S) as connection:
        notice_loss(connection, PATIENCE_S)
        machine.cut()
        connection.sendall(b"y")
        time.sleep(0.5)
        machine.mend()
        assert connection.recv(1) == b"y"
