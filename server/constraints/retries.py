"""Limit and delay the replacement of a lost process."""

from __future__ import annotations

import time

from server.constraints.matcher import ConstraintError

MAX_LOSSES = 6  # most losses in a row, without an answer in between, after which the process is still replaced
FIRST_PAUSE_S = 0.05  # pause after the first loss; it doubles with each further loss, so the six pauses last 3 s together


class Retries:
    """Counts the losses of a process, and says when to replace it."""

    def __init__(self) -> None:
        self._num_lost = 0
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the process may be replaced now."""
        return time.monotonic() >= self._next_s

    def answered(self) -> None:
        """Note an answer: losses are no longer in a row."""
        self._num_lost = 0

    def lost(self, error: ConstraintError) -> None:
        """Count a loss and schedule the next try. Raise `error` if there were too many losses in a row."""
        self._num_lost += 1
        if self._num_lost > MAX_LOSSES:
            raise error
        self._next_s = time.monotonic() + FIRST_PAUSE_S * 2 ** (self._num_lost - 1)
