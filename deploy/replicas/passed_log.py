"""Pass the log of a process on to the log of this process, which the engine of the fleet keeps, and remember its last lines."""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO

LAST_LINES = 3
END_S = 1.0  # longest wait for the end of the pipe, which a child of the process may keep open


class PassedLog:
    """Copies lines from a pipe to standard error on a thread of its own, until the pipe ends."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._pass_on, name="passed-log", daemon=True)
        self._thread.start()

    def wait(self, within_s: float = END_S) -> None:
        """Wait until the last lines of a process that has ended are passed on, at most `within_s` seconds."""
        self._thread.join(within_s)

    def last_lines(self) -> str:
        """Return the last LAST_LINES lines of a process that has ended."""
        self.wait()
        return "".join([*self._last]).strip()

    def _pass_on(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._last.append(line)
                if sys.stderr is not None:  # None: standard error was closed before this process started
                    with suppress(OSError):  # a disk may be full for a while
                        sys.stderr.write(line)
