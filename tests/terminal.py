"""Programs in a pseudo-terminal that controls them, so that Ctrl-C interrupts them as it does for a user."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.process_states import state_of

# Makes the standard input the controlling terminal of a new session, and becomes the program. Tests that run in the background of a shell
# ignore interrupts; a program in a terminal does not.
CONTROLLED = (
    "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)
PROMPT = r"(^|\n|\r)> $"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process = process
        self._ours = ours
        self.said = ""  # everything so far
        self._seen = 0

    def until(self, pattern: str, timeout_s: float = 300.0) -> str:
        """Wait until the output since the last call matches `pattern`, and return this output."""
        end = time.monotonic() + timeout_s
        while not re.search(pattern, self.said[self._seen :]):
            assert time.monotonic() < end and self._read(end), f"no {pattern!r} in {self.said[self._seen :]!r}"
        new, self._seen = self.said[self._seen :], len(self.said)
        return new

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C while the program waits. Between the prompt and the wait for a line, Python only notes an interrupt, and handles it
        at the next key."""
        end = time.monotonic() + 60
        while state_of(self.process.pid) != "S":
            assert time.monotonic() < end, "the program computes without end"
            time.sleep(0.001)
        self.write("\x03")

    def ended(self, timeout_s: float = 300.0) -> int:
        """Wait for the end, and return the status that a shell would show."""
        end = time.monotonic() + timeout_s
        while self._read(end):
            pass
        status = self.process.wait(max(0.0, end - time.monotonic()))
        return status if status >= 0 else 128 - status

    def _read(self, end: float) -> bool:
        """Read what the program writes. Return False at its end, or if it writes nothing in time."""
        if not select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            found = os.read(self._ours, 1 << 16)
        except OSError:  # the last process has closed the terminal
            return False
        self.said += found.decode(errors="replace")
        return bool(found)


@contextmanager
def terminal(command: Sequence[str | Path], environment: Mapping[str, str], cwd: Path | None = None) -> Generator[Terminal]:
    ours, its = os.openpty()
    words = [sys.executable, "-c", CONTROLLED, *map(str, command)]
    with subprocess.Popen(words, env={**environment, "TERM": "dumb"}, cwd=cwd, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
