"""How often a lost process is replaced, and when."""

from __future__ import annotations

import time

from server.constraints.matcher import ConstraintError

MAX_LOSSES = 6  # one after the other, without an answer between them
FIRST_PAUSE_S = 0.05  # doubled with each loss: all together 3 s


class Retries:
    def __init__(self) -> None:
        self._num_lost = 0
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next_s

    def answered(self) -> None:
        self._num_lost = 0

    def lost(self, error: ConstraintError) -> None:
        """Raises the error if it was lost too often."""
        self._num_lost += 1
        if self._num_lost > MAX_LOSSES:
            raise error
        self._next_s = time.monotonic() + FIRST_PAUSE_S * 2 ** (self._num_lost - 1)
