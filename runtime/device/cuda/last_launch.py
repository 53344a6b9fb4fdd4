"""Name the kernel that began last. After a fault, this is the kernel that failed.

With RELAXSERVE_DEBUG=1 or more, kernels name themselves: a kernel begins only after the previous one has ended, and then writes the address
of its record (records.py) to a word in memory of the host, which can be read after a fault. Without debugging, kernels do not write to this
word, because a kernel ends only when its writes have ended, and a write to the host takes about a microsecond.
"""

from __future__ import annotations

from runtime import flags
from runtime.device.cuda.card import Card


class LastLaunch:
    """Finds the launch of a card that began last, if kernels name themselves. `str()` of this object describes the launch, for messages."""

    def __init__(self, card: Card) -> None:
        self._word = card.pinned(self, 1) if flags.current().debug else None
        # the address at which the card reaches the word of the host; None: kernels do not name themselves
        self.address = None if self._word is None else card.address_of(self._word)
        self.tells = self.address is not None  # whether kernels name themselves
        self._records: dict[int, str] = {}
        self.num_runs = 0

    def know(self, record: int, description: str) -> None:
        """Store the description of the launch whose record has the address `record`."""
        self._records[record] = description

    def __str__(self) -> str:
        if self._word is None:
            return f"in run {self.num_runs} (with RELAXSERVE_DEBUG=1, the message names the kernel)" if self.num_runs else "before any run"
        known = self._records.get(int(self._word[0]))
        return "before any launch" if known is None else f"{known}, in run {self.num_runs}"
