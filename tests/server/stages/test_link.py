"""Messages and arrays between stages, and connections that end or bring something else."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from server.messages import ErrorCode, Load, LoadFailed, Progress, Working
from server.stages import link
from server.stages.link import HEADER, MOST_MESSAGE_BYTES, Link, StageLost
from server.stages.messages import CopyPage, Ended, Greeting, Loaded, Planned, Reserve, Run, Stream
from tests.conftest import ROOT
from tests.network import can_cut, other_machine

MESSAGES = [
    Load("m", "/m", layers=(0, 3)),
    Greeting("1.0", 5),
    Progress("compile", 0.5),
    LoadFailed(ErrorCode.LOAD_REFUSED, "no"),
    Planned("fp_1", 100, (5, 6)),
    Reserve((5, 6)),
    Loaded(1, 2, 3, (4,)),
    Working(1.5),
    CopyPage(0, 1, 2),
]


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    yield Link(near, "here"), far
    near.close()
    far.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(pair, message) -> None:
    link, far = pair
    Link(far, "there").send(message)
    assert link.receive() == (message, [])


def test_arrays_arrive_as_they_were_sent(pair) -> None:
    """Among the arrays are large ones, which the socket takes piece by piece, empty ones, and views whose elements are not adjacent."""
    link, far = pair
    random_numbers = np.random.default_rng(1).standard_normal((700, 900)).astype(np.float32)
    arrays = [np.arange(5, dtype=np.int32), random_numbers, np.empty((0, 3), np.int32), random_numbers[::3, ::2], random_numbers.T]
    sender = threading.Thread(target=Link(far, "there").send, args=(Run(), arrays))
    sender.start()
    message, found = link.receive()
    sender.join()
    assert message == Run() and len(found) == len(arrays)
    for got, sent in zip(found, arrays, strict=True):
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)


def test_an_ended_process_is_lost_and_says_how(pair) -> None:
    link, far = pair
    Link(far, "there").send(Ended("killed by SIGKILL", from_outside=True))
    with pytest.raises(StageLost, match="the process of here ended: killed by SIGKILL") as lost:
        link.receive()
    assert lost.value.from_outside


@pytest.mark.parametrize("after", [0, 1, 7, 8, 20])
def test_a_connection_that_ends_is_lost(pair, after: int) -> None:
    link, far = pair
    far.sendall((HEADER.pack(100, 100) + bytes(100))[:after])
    far.close()
    with pytest.raises(StageLost, match="the connection to here has ended"):
        link.receive()
    with pytest.raises(StageLost):
        for _ in range(10):
            link.send(Stream(), [np.zeros(1000, np.float32)])


def test_a_known_process_says_how_it_ended() -> None:
    near, far = socket.socketpair()
    far.close()
    with pytest.raises(StageLost, match="the process of there ended: exit status 3") as lost:
        Link(near, "there", lambda: ("exit status 3", False)).receive()
    assert not lost.value.from_outside
    near.close()


def test_rubbish_is_refused_and_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may claim gigabytes, and a message may have arrays that its bytes do not have."""
    read, asked = Link._read, list[int]()
    monkeypatch.setattr(Link, "_read", lambda self, num_bytes: asked.append(num_bytes) or read(self, num_bytes))
    rng = random.Random(5)
    for _ in range(300):
        near, far = socket.socketpair()
        shape = [rng.choice([0, 3, 1 << 40, -1]) for _ in range(rng.randrange(3))]
        frame = link._encode(link._Frame(Stream(), ((rng.choice("ifx"), tuple(shape)),)))
        body = rng.choice([rng.randbytes(rng.randrange(0, 60)), frame])
        claimed = rng.choice([(len(body), rng.randrange(1, 9)), (len(body), (1 << 31) - 4), (1 << 31, 0), (1 << 20, 1 << 31)])
        far.sendall(rng.choice([HEADER.pack(*claimed), b""]) + body)
        far.close()
        with pytest.raises(StageLost):
            Link(near, "there").receive()
        near.close()
    assert max(asked) <= MOST_MESSAGE_BYTES


ECHO = """
import socket, sys
from server.stages.link import Link
listener = socket.create_server((sys.argv[1], 7000))
print(flush=True)
link = Link(listener.accept()[0], "here")
while True:
    link.send(*link.receive())
"""


@pytest.mark.skipif(not can_cut(), reason="may not make a network of its own, which tests cut")
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_stage_whose_machine_falls_silent_is_lost(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LOST_S", 1.0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with other_machine() as machine:
        words = [*machine.inside, sys.executable, "-c", ECHO, machine.far]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as far:
            assert far.stdout is not None
            far.stdout.readline()
            near = Link(socket.create_connection((machine.far, 7000)), "stage 1")
            near.limit_silence(60.0)  # longer than the kernel takes
            try:
                near.send(CopyPage(0, 1, 2))
                assert near.receive()[0] == CopyPage(0, 1, 2)
                machine.cut()
                if is_busy:
                    near.send(CopyPage(0, 1, 3))
                    with pytest.raises(StageLost, match="the connection to stage 1 has failed: Connection timed out"):
                        near.receive()
                else:
                    waiting = threading.Thread(target=near.wait_for_end, daemon=True)
                    waiting.start()
                    waiting.join(60)
                    assert not waiting.is_alive()
            finally:
                near.close()
                far.kill()
