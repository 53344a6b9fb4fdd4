"""Define how long a supervisor waits for its workers, and how long it waits before it starts the next worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Care:
    """The delays and timeouts of a supervisor."""

    stall_s: float = 15.0  # seconds without a message after which a worker that has work may count as stalled: see watchdog.py
    first_delay_s: float = 0.1  # seconds before the second restart in a row, doubled before each further one; the first has no delay
    longest_delay_s: float = 5.0
    killed_delay_s: float = 0.5  # longest delay after a kill from outside; such a kill does not mean that the next start will fail
    settled_s: float = 30.0  # a worker that lived this long resets the restart delay
    load_silence_s: float = 600.0  # seconds without progress after which the load of a restarted worker is ended and begun again
    patience_s: float = 60.0  # time for which new requests wait for a restart
    stop_s: float = 3.0  # time for a worker to obey Shutdown


class EarlyDeaths:
    """Counts the workers in a row that died early, before they had produced anything. The more have died, the longer is the delay before
    the next start. After a worker that lived for `Care.settled_s`, the count begins again."""

    def __init__(self, care: Care) -> None:
        self._care = care
        self._num_fruitless = 0

    def clear(self) -> None:
        """Forget the workers that died: the present worker has produced something, or was ended on purpose."""
        self._num_fruitless = 0

    def count(self, lived_s: float = 0.0) -> None:
        """Count a worker that died. `lived_s`: seconds from the time when it was ready to its death; 0: it died while it loaded."""
        self._num_fruitless = 1 if lived_s > self._care.settled_s else self._num_fruitless + 1

    def delay_s(self, *, killed: bool) -> float:
        """Return the seconds to wait before the next start: 0 after the first early death, `first_delay_s` after the second, and twice as
        long after each further one, at most `longest_delay_s`. `killed`: the last worker was killed from outside, so the delay is at most
        `killed_delay_s`."""
        num_doublings = min(self._num_fruitless - 2, 30)
        if num_doublings < 0:
            return 0.0
        most_s = self._care.killed_delay_s if killed else self._care.longest_delay_s
        return min(most_s, self._care.first_delay_s * 2.0**num_doublings)
