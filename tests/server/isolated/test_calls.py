"""A job runs in its own process, and each call ends in one of the described ways."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.isolated.calls import Calls
from server.isolated.job import HEAD_BYTES, CallError, Failure, taker
from tests.conftest import children_of

PATIENCE_S = 600.0  # on a busy machine, the allowed CPU time takes minutes
JOB = """
import os
import signal
import sys
import time
import traceback
import warnings

class Job:
    prepare_s, call_s, call_bytes = 60.0, 0.5, 64 << 20

    def prepare(self):
        self.prepared_in = os.getpid()

    def warm(self):
        self.warmed_in = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def run(self, work):
        match work:
            case b"who":
                return f"{self.prepared_in} {self.warmed_in} {os.getpid()}".encode()
            case b"spin":
                while True:
                    pass
            case b"nap":
                signal.sigwait({signal.SIGUSR1})
                return b"rested"
            case b"sleep":
                time.sleep(3600.0)
            case b"warn":
                warnings.warn("noise")
                return b"quiet"
            case b"large":
                return bytes(1 << 30)
            case b"deep":
                return deep()
            case b"open":
                return open("/dev/null", "rb").read()
            case b"crash":
                os.abort()
            case b"killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"long":
                return bytes(8 << 20)
            case b"exit":
                sys.exit("reason")
            case b"unlogged":
                traceback.print_exc = exhaust
                raise ValueError
            case b"end late":
                os.write = write_and_end
                return bytes(1 << 20)
            case b"fail late":
                os.write = write_and_end
                raise MemoryError
            case _:
                return work[::-1]

def deep():
    return deep()

def exhaust():
    raise MemoryError

write = os.write

def write_and_end(fd, data):
    num = write(fd, data[:1 << 16])
    os.kill(os.getpid(), signal.SIGPROF)  # the CPU time is over
    return num
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    (tmp_path / "job_of_test.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Calls(importlib.import_module("job_of_test").Job(), PATIENCE_S)


def failure_of(calls: Calls, work: bytes) -> CallError:
    with pytest.raises(CallError) as caught:
        calls.call_blocking(work)
    return caught.value


def test_a_call_has_a_fork_of_its_own(calls: Calls) -> None:
    first, second = (calls.call_blocking(b"who").split() for _ in range(2))
    assert first[0] == second[0], "the job is prepared once"
    assert first[1] == first[2] != second[2] == second[1] != first[0]
    assert calls.call_blocking(b"abc") == b"cba" and calls.call_blocking(b"") == b""


@contextmanager
def log_is_empty() -> Iterator[None]:
    """Check at the end that a process of a job which was started meanwhile has logged nothing."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    saved = os.dup(2)
    os.dup2(writing, 2)  # which the process of the job inherits
    try:
        yield
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.dup2(saved, 2)
        for fd in (saved, reading, writing):
            os.close(fd)


def test_warnings_about_a_clients_file_are_not_logged(calls: Calls) -> None:
    """A job may write to no file. A warning, however, could reach the pipe of a log, and the job would wait if nobody read the pipe."""
    with log_is_empty():
        assert calls.call_blocking(b"warn") == b"quiet"


def test_a_call_that_the_front_gives_up_is_not_logged(calls: Calls) -> None:
    """The front closes the connection before it has read anything from it."""
    with log_is_empty():
        near, far = socket.socketpair()
        with near, far:
            assert calls._started().hand_over(far.fileno())
            fork = taker(near.recv(HEAD_BYTES, socket.MSG_PEEK))
        while Path(f"/proc/{fork}").exists():
            time.sleep(0.01)


def test_calls_run_at_once(calls: Calls) -> None:
    async def many() -> list[bytes]:
        return await asyncio.gather(*(calls.call(str(i).encode() * 100_000) for i in range(10, 30)))

    assert asyncio.run(many()) == [str(i)[::-1].encode() * 100_000 for i in range(10, 30)]


@pytest.mark.parametrize(
    ("work", "failure", "detail"),
    [
        (b"spin", Failure.STOPPED, ""),
        (b"large", Failure.TOO_LARGE, "MemoryError"),
        (b"deep", Failure.TOO_LARGE, "RecursionError"),
        (b"open", Failure.STOPPED, ""),  # a call that fails by a bug
        (b"crash", Failure.STOPPED, ""),
        (b"exit", Failure.STOPPED, ""),
        (b"unlogged", Failure.STOPPED, ""),  # there is no memory to log the bug
        (b"killed", Failure.KILLED, ""),
    ],
)
def test_limits_end_a_call_and_no_other(calls: Calls, work: bytes, failure: Failure, detail: str) -> None:
    error = failure_of(calls, work)
    assert (error.failure, error.detail) == (failure, detail)
    assert calls.call_blocking(b"abc") == b"cba"


def test_only_a_call_that_was_killed_from_outside_is_made_again(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, the kernel kills processes that are not at fault. A call that exceeds its own limits would do so again."""
    asked: list[bytes] = []
    ask = calls._ask

    async def counted(work: bytes) -> bytearray | None:
        asked.append(work)
        return await ask(work)

    monkeypatch.setattr(calls, "_ask", counted)
    for work in (b"killed", b"crash", b"spin", b"exit"):
        failure_of(calls, work)
    assert asked == [b"killed", b"killed", b"crash", b"spin", b"exit"]


def test_a_part_of_a_result_is_none(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed while it sends its result. An earlier version took the part that had arrived for the whole."""
    whole = asyncio.run(calls._ask(b"long"))
    assert whole is not None and len(whole) > 8 << 20
    parts = [whole[: HEAD_BYTES + 4], whole[:-1], whole]
    monkeypatch.setattr(calls, "_ask", lambda _: asyncio.sleep(0, bytearray(parts.pop(0))))
    assert failure_of(calls, b"long").failure is Failure.KILLED
    assert calls.call_blocking(b"long") == bytes(8 << 20)


def test_an_answer_is_sent_as_a_whole_although_the_cpu_time_ends_meanwhile(calls: Calls) -> None:
    """An earlier version took the part that had arrived for the answer of a process that was killed from outside, or appended a
    traceback."""
    assert calls.call_blocking(b"end late") == bytes(1 << 20)
    error = failure_of(calls, b"fail late")
    assert (error.failure, error.detail) == (Failure.TOO_LARGE, "MemoryError")


def test_a_process_that_cannot_fork_is_reported(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a process that cannot fork is an error with the reason."""
    answer = bytearray(b"\1\0\0\0\0\4Resource temporarily unavailable")
    monkeypatch.setattr(Calls, "_ask", lambda *_: asyncio.sleep(0, answer))
    error = failure_of(calls, b"abc")
    assert (error.failure, error.detail) == (Failure.NO_FORK, "Resource temporarily unavailable")


def test_a_system_that_starts_no_process_is_reported(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses the process that prepares the job. The next call tries again."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as refusing:
        refusing.setattr(subprocess, "Popen", refuse)
        error = failure_of(calls, b"abc")
    assert (error.failure, error.detail) == (Failure.NO_FORK, "Resource temporarily unavailable")
    assert calls.call_blocking(b"abc") == b"cba"


def test_a_system_without_descriptors_is_reported(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the call gets no event loop. A process that cannot be started ahead is started by the next call."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as refusing:
        refusing.setattr(subprocess, "Popen", refuse)
        calls.start()
        refusing.setattr(asyncio.events, "new_event_loop", refuse)
        error = failure_of(calls, b"abc")
        gc.collect()  # an error if a coroutine is left that nobody awaited
    assert (error.failure, error.detail) == (Failure.NO_FORK, "Too many open files")
    assert calls.call_blocking(b"abc") == b"cba"


def test_a_system_without_threads_is_reported(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        error = failure_of(calls, b"abc")
        gc.collect()  # an error if a coroutine is left that nobody awaited
    assert (error.failure, error.detail) == (Failure.NO_FORK, "can't start new thread")


def test_a_call_that_nobody_takes_fails(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "_ask", lambda *_: asyncio.sleep(0, b""))
    assert failure_of(calls, b"abc").failure is Failure.NOT_TAKEN


def test_a_killed_process_is_replaced(calls: Calls) -> None:
    first = calls.call_blocking(b"who").split()[0]
    os.killpg(int(first), signal.SIGKILL)
    assert calls.call_blocking(b"who").split()[0] != first


def test_a_late_call_ends_and_no_other(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late call may be an attack, and the other calls belong to other clients."""
    first = int(calls.call_blocking(b"who").split()[0])
    limits: list[asyncio.Timeout] = []
    answers: list[bytearray] = []  # what each try has read so far
    connect = asyncio.open_unix_connection

    def limited(_: float) -> asyncio.Timeout:
        limits.append(asyncio.Timeout(None))
        return limits[-1]

    async def observed(**options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(**options)
        read, answer = reader.read, bytearray()
        answers.append(answer)

        async def read_and_kept(count: int) -> bytes:
            chunk = await read(count)
            answer.extend(chunk)
            return chunk

        monkeypatch.setattr(reader, "read", read_and_kept)
        return reader, writer

    async def taken(num_tries: int) -> None:
        while len(answers) < num_tries or len(answers[-1]) < HEAD_BYTES:
            await asyncio.sleep(0.01)
        assert len(limits) == len(answers) == num_tries

    async def alone() -> None:
        while len(children_of(first)) != 1:  # the fork that waits for the next call
            await asyncio.sleep(0.01)

    async def run() -> bytes:
        other = asyncio.create_task(calls.call(b"nap"))
        await asyncio.wait_for(taken(1), PATIENCE_S)
        late = asyncio.create_task(calls.call(b"sleep"))
        for number in (2, 3):  # it is tried twice
            await asyncio.wait_for(taken(number), PATIENCE_S)
            limits[-1].reschedule(0.0)
        with pytest.raises(CallError) as caught:
            await late
        assert caught.value.failure is Failure.LATE
        os.kill(taker(answers[0]), signal.SIGUSR1)  # ends the nap
        answer = await asyncio.wait_for(other, PATIENCE_S)
        await asyncio.wait_for(alone(), PATIENCE_S)
        return bytes(answer)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "timeout", limited)
        patch.setattr(asyncio, "open_unix_connection", observed)
        assert asyncio.run(run()) == b"rested"
    assert int(calls.call_blocking(b"who").split()[0]) == first


def test_only_forks_are_ended_by_their_id(calls: Calls) -> None:
    """A fork runs work from outside, and may send any four bytes as its id."""
    first = calls.call_blocking(b"who").split()[0]
    assert calls._process is not None
    for pid in (0, 1, os.getpid(), int(first), 2**31 - 1, 2**31, 2**32 - 1):
        calls._process.end_fork(pid)
    assert calls.call_blocking(b"who").split()[0] == first


def test_a_late_answer_is_no_lost_process(calls: Calls) -> None:
    calls.call_blocking(b"")
    calls.patience_s = 0.0
    assert failure_of(calls, b"abc").failure is Failure.LATE
