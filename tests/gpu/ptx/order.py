"""Order a kernel's accesses to global memory against kernels that may still run when it begins (programmatic dependent launch).

Kernels run here one after another, so that a mistake would change no bytes. It is found by a record of which launch wrote each word last.
Until a thread has executed griddepcontrol.wait, it is a fault

    to read what was written by a launch that may still run,
    to write anything, because a launch that may still run may read it, or write it later,
    to end, because the next launch waits only for this one, not for those before it.

PTX lets one thread wait for its whole grid; here each thread must.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.program import Array, Index

WORD = 4  # bytes; narrower accesses count as accesses to the whole word


class Order:
    def __init__(self, wave: Any) -> None:
        self.wave, self.number, self.since = wave, wave.launch.number, wave.launch.since
        self.writers = wave.memory.writers
        # Whether each thread has waited; None: no other launch runs.
        self.waited = None if self.since is None else np.zeros(len(wave.threads), bool)

    def wait(self, index: Index) -> None:
        if self.waited is not None:
            self.waited[index] = True

    def read(self, index: Index, offsets: Array, num_bytes: int) -> None:
        if self.waited is None or self.waited[index].all():
            return
        early = ~self.waited[index]
        found = self.writers[_words(np.broadcast_to(offsets, early.shape)[early], num_bytes)].max(axis=1)
        if (found >= self.since).any():
            row = int(np.argmax(found))
            raise Fault(
                f"reads before griddepcontrol.wait what launch {found[row]} wrote, which may still run: {self._name(index, early, row)}"
            )

    def write(self, index: Index, offsets: Array, num_bytes: int) -> None:
        if self.waited is not None and not self.waited[index].all():
            early = ~self.waited[index]
            raise Fault(f"writes before griddepcontrol.wait, while launch {self.since} may still run: {self._name(index, early, 0)}")
        self.writers[_words(offsets, num_bytes)] = self.number

    def end(self, threads: Array) -> None:
        if self.waited is not None and not self.waited[threads].all():
            early = ~self.waited[threads]
            raise Fault(
                f"ends without griddepcontrol.wait, so that the next launch would not wait for launch {self.since}: "
                f"{self._name(threads, early, 0)}"
            )

    def _name(self, index: Index, early: Array, row: int) -> str:
        return self.wave.name(int(self.wave.threads[index][early][row]))


def _words(offsets: Array, num_bytes: int) -> Array:
    """Return the words that each access touches: [accesses, words]."""
    return offsets[:, None] // WORD + np.arange(max(1, num_bytes // WORD))
