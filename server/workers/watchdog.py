"""Decide when a worker that has work and sends nothing has stalled. A slow step is no stall: on a busy machine, a step may take many times
as long as usual.

A silent worker has stalled if it used almost no CPU time for `stall_s` seconds: it is suspended, or waits for something that never comes.
It has also stalled if its step takes longer than both `stall_s` and the limit that the worker announced. This limit is a wide multiple of
the time that the step should take.

Time is counted in looks and not by the clock, because a delay of this process must not count as the worker's silence. After a delay, this
process reads the worker's messages before the next look.
"""

from __future__ import annotations

from collections import deque

NUM_LOOKS = 8  # looks per `stall_s`
LEAST_SHARE = 0.002  # share of a core that a worker uses at least while it works, however busy the machine is
LEAST_S = 0.01  # the kernel counts CPU time in units of this size


class Watchdog:
    """Judges one worker by its messages and its CPU time."""

    def __init__(self, stall_s: float) -> None:
        self.interval_s = stall_s / NUM_LOOKS  # seconds between two looks
        self._stall_s = stall_s
        self._limit_s = 0.0  # how long the present step may take; 0: the worker announced nothing
        self._num_silent = 0  # looks since the last message
        self._cpu_s: deque[float] = deque(maxlen=NUM_LOOKS + 1)  # CPU time of the worker at the last looks

    def hear(self) -> None:
        """Note that the worker has sent a message, or has no work."""
        self._num_silent = 0
        self._cpu_s.clear()

    def expect(self, limit_s: float) -> None:
        """Note how long the worker's present step may take."""
        self._limit_s = limit_s

    def look(self, cpu_s: float) -> str:
        """Count a look at a worker that has sent no message since the last look. Return in words how the worker has stalled, or an empty
        text if it has not. `cpu_s`: the CPU time that the worker and the model's other stages have used since they started."""
        self._num_silent += 1
        self._cpu_s.append(cpu_s)
        if self._num_silent <= NUM_LOOKS:
            return ""
        if cpu_s - self._cpu_s[0] < max(LEAST_S, LEAST_SHARE * self._stall_s):
            return f"was silent for {self._silent_s:g} s and used no CPU time"
        if self._silent_s > max(self._stall_s, self._limit_s):
            return f"was silent for {self._silent_s:g} s in a step that may take {self._limit_s:.3g} s"
        return ""

    @property
    def _silent_s(self) -> float:
        """The time since the last message, counted in looks."""
        return (self._num_silent - 1) * self.interval_s
