"""Record, for each thread, up to which time the accesses of other blocks of its cluster are ordered before its own.

A barrier of the cluster orders everything before it. An arrival at an mbarrier passes on what the arriving thread knows, and a thread that
waits for the mbarrier learns it. The threads of a block share what they know at a barrier of the block. It is a fault if a thread
overwrites what another block accessed after the time that the thread knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Known:
    """For each thread and each rank: the time before which all that the block did is ordered before the thread's next instruction."""

    def __init__(self, wave: Any) -> None:
        self.wave, self.times = wave, np.zeros((len(wave.threads), wave.cluster), np.int32)

    def of_arrivals(self, threads: Array) -> Array:
        """Return what threads pass on when they arrive at an mbarrier: what they know of other blocks, and all that their own block has
        done. The mbarrier waits for all its threads, so what the others of the block do before they arrive is ordered too."""
        times, own = self.times[threads], self.wave.rank[self.wave.slot[threads]]
        times[np.arange(len(threads)), own] = self.wave.shadow.next_time()
        return times

    def learn(self, threads: Array, times: Array) -> None:
        self.times[threads] = np.maximum(self.times[threads], times)

    def share(self, threads: Array) -> None:
        """Let the threads of each block that pass a barrier of the block know what any of them knows."""
        best = np.zeros((len(self.wave.blocks), self.wave.cluster), np.int32)
        np.maximum.at(best, self.wave.slot[threads], self.times[threads])
        self.times[threads] = best[self.wave.slot[threads]]
