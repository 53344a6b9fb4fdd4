"""One attempt to get an answer of an MCP server: it ends at its deadline, and any thread may cancel it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from server.mcp.errors import McpStopped

Progress = Callable[[Mapping[str, Any]], None]


class Attempt:
    """One attempt, which ends `timeout_s` after it was made."""

    def __init__(self, timeout_s: float, progress: Progress | None = None) -> None:
        """`progress` is called with the parameters of each progress notification."""
        self.timeout_s = timeout_s
        self.progress = progress
        self._ends_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None
        self._is_cancelled = False

    @property
    def remaining_s(self) -> float:
        """The seconds until the attempt ends."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def has_ended(self) -> bool:
        """Whether the attempt was cancelled, or its time is over."""
        return self._is_cancelled or not self.remaining_s

    def within(self, most_s: float) -> Attempt:
        """Return an attempt for a part of the work. The returned attempt ends after `most_s`, or earlier at the deadline of this attempt.
        Cancelling this attempt does not cancel the returned one."""
        return Attempt(min(most_s, self.remaining_s))

    def cancel(self) -> None:
        """End the attempt now."""
        with self._lock:
            self._is_cancelled = True
            stop = self._stop
        if stop is not None:
            stop()

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Generator[None]:
        """While the `with` block waits for a server, `cancel` calls `stop` from another thread, which ends the wait. If the attempt is
        cancelled already, call `stop` at once."""
        with self._lock:
            self._stop = stop
            is_late = self._is_cancelled
        if is_late:
            stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None

    def pause(self, pause_s: float) -> None:
        """Wait for some time, or until the attempt ends."""
        is_over = threading.Event()
        with self.stopping(is_over.set):
            is_over.wait(min(pause_s, self.remaining_s))

    def fault(self, name: str) -> McpStopped:
        """Return the error for an attempt that has ended without an answer."""
        if self._is_cancelled:
            return McpStopped(f"the call of MCP server {name!r} was cancelled")
        return McpStopped(f"MCP server {name!r} did not answer within {self.timeout_s:g} s")
