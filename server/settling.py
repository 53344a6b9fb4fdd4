"""Decide when a model settles. To settle is to do, on another thread, the work that makes later steps faster and would have delayed the
first ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

REST_S = 1.0  # idle seconds after which a model settles
STEADY_S = 10.0  # seconds of steps without a pause after which a process settles


class Settling:
    """Settle when the process has been idle for REST_S after some steps, and every STEADY_S while it computes without a pause. Before the
    first step there is nothing to settle. All calls come from one thread."""

    def __init__(self, settle: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._settle = settle
        self._clock = clock
        self._due_s: float | None = None  # time to settle even if the process is never idle; None: no step has ended since it last settled
        self._thread: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """Whether `rest` is to be called after REST_S seconds without work."""
        return self._due_s is not None

    def note_step(self) -> None:
        """Note that a step has ended, and settle if the process has computed for STEADY_S without a pause."""
        now_s = self._clock()
        if self._due_s is None:
            self._due_s = now_s + STEADY_S
        elif now_s >= self._due_s:
            self._start()

    def rest(self) -> None:
        """Settle if a step has ended since the process last settled. Call this when the process has been idle for REST_S."""
        if self._due_s is not None:
            self._start()

    def _start(self) -> None:
        """Settle on a new thread. Do nothing if the last settling still runs, or if the system has no thread for this process now. In any
        case, the next step sets a new time to settle."""
        self._due_s = None
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._settle, name="settle", daemon=True)
            with suppress(RuntimeError):  # no thread is left for now
                thread.start()
                self._thread = thread
