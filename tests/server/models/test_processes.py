"""Processes are measured with their descendants, whatever these are called and whenever their threads end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.models.processes import usage_of

NAMED = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xc3', 0, 0, 0); print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process whose name is no UTF-8: the kernel cuts names after 15 bytes."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_may_have_any_name(child: subprocess.Popen[bytes]) -> None:
    assert usage_of(child.pid).own_bytes > 1 << 20
    assert usage_of(os.getpid()).own_bytes > usage_of(child.pid).own_bytes


def test_a_thread_that_ends_meanwhile_hides_no_process(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are listed first, and each is asked for its children a moment later."""
    whole = usage_of(os.getpid())
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "0" / "children", *glob(folder, pattern)])
    found = usage_of(os.getpid())
    assert found.cpu_s >= whole.cpu_s
    assert found.own_bytes > usage_of(child.pid).own_bytes > 1 << 20


def test_a_process_that_ends_while_its_threads_are_listed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(folder: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(Path, "glob", ended)  # as before Python 3.12
    assert usage_of(os.getpid()).own_bytes > 1 << 20
