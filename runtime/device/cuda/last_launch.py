"""Name the kernel that began last. After a fault, this is the kernel that failed. Each kernel writes the address of its record to one word
of the host when it begins."""

from __future__ import annotations

from runtime.device.cuda.card import Card


class LastLaunch:
    def __init__(self, card: Card) -> None:
        self._word = card.pinned(self, 1)
        self.address = card.address_of(self._word)  # the address at which the card reaches the word
        self._records: dict[int, str] = {}
        self.num_runs = 0

    def know(self, record: int, description: str) -> None:
        self._records[record] = description

    def __str__(self) -> str:
        known = self._records.get(int(self._word[0]))
        return "before any launch" if known is None else f"{known}, in run {self.num_runs}"
