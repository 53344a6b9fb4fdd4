"""A job runs in its own process, and each call ends in one of the described ways."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from server.isolated.calls import HEAD_BYTES, Calls
from server.isolated.job import CallError, Failure, taker
from tests.conftest import children_of

PATIENCE_S = 600.0  # on a busy machine, the allowed CPU time takes minutes
JOB = """
import os
import signal
import time
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
            case _:
                return work[::-1]

def deep():
    return deep()
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


def test_warnings_about_a_clients_file_are_not_logged(calls: Calls) -> None:
    """A job may write to no file. A warning, however, could reach the pipe of a log, and the job would wait if nobody read the pipe."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    saved = os.dup(2)
    os.dup2(writing, 2)  # which the process of the job inherits
    try:
        assert calls.call_blocking(b"warn") == b"quiet"
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.dup2(saved, 2)
        for fd in (saved, reading, writing):
            os.close(fd)


def test_calls_run_at_once(calls: Calls) -> None:
    async def many() -> list[bytes]:
        return await asyncio.gather(*(calls.call(str(i).encode() * 100_000) for i in range(10, 30)))

    assert asyncio.run(many()) == [str(i)[::-1].encode() * 100_000 for i in range(10, 30)]


@pytest.mark.parametrize(
    ("work", "failure", "detail"),
    [
        (b"spin", Failure.KILLED, ""),
        (b"large", Failure.TOO_LARGE, "MemoryError"),
        (b"deep", Failure.TOO_LARGE, "RecursionError"),
        (b"open", Failure.KILLED, ""),  # a call that fails by a bug ends without an answer
    ],
)
def test_limits_end_a_call_and_no_other(calls: Calls, work: bytes, failure: Failure, detail: str) -> None:
    error = failure_of(calls, work)
    assert (error.failure, error.detail) == (failure, detail)
    assert calls.call_blocking(b"abc") == b"cba"


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
