"""A worker's process that is started ahead: the first worker with its command uses it, and it ends with the front."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.workers import starting
from server.workers.starting import start_ahead, take
from server.workers.worker_process import WorkerProcess


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    starting._discard_all()


def waiting() -> tuple[str, ...]:
    """Return the command of a process that ends when its socket is closed."""
    program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
    return (sys.executable, "-c", program)


def test_the_first_worker_uses_the_process_and_the_next_has_its_own() -> None:
    start_ahead(waiting(), {})
    pid = starting._ahead[0].process.pid

    async def scenario() -> None:
        first, second = await WorkerProcess.open(waiting(), print), await WorkerProcess.open(waiting(), print)
        assert first.pid == pid and second.pid != pid
        for worker in (first, second):
            worker.kill()
            assert await worker.close(10.0) == "killed by SIGKILL"

    asyncio.run(scenario())


def test_another_command_does_not_use_it() -> None:
    start_ahead(waiting(), {})
    assert take((*waiting(), "another")) is None
    started = take(waiting())
    assert started is not None
    started.discard()


def test_a_process_that_has_ended_is_not_used() -> None:
    start_ahead((sys.executable, "-c", ""), {})
    starting._ahead[0].process.wait()
    assert take((sys.executable, "-c", "")) is None and not starting._ahead


def test_without_memory_for_a_process_the_worker_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        start_ahead(waiting(), {})
    assert take(waiting()) is None


FRONT = """
import sys
from server.workers.starting import start_ahead, _ahead
start_ahead((sys.executable, "-c", "import time; time.sleep(1000)"), {})
print(_ahead[0].process.pid)
"""


def test_it_ends_with_a_front_that_needs_none() -> None:
    pid = int(subprocess.run([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, check=True).stdout)
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, "the process outlived the front"
        time.sleep(0.01)


def test_starting_ahead_imports_little() -> None:
    """Whatever this module imports delays the start of the first worker."""
    program = "import sys; from server.workers import starting; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert not {"asyncio", "numpy", "msgspec", "fastapi"} & {*imported}
