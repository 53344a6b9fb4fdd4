"""Bytes: who holds how many, how many there may be, and the arena that the planned tensors of all functions share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cpu import host_buffer
from runtime.errors import OutOfMemory
from runtime.sections import align


class MemoryAccount:
    """Counts bytes by part and refuses, before anything is allocated, what would exceed the limit (None: unlimited)."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.parts: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self.parts.values())

    def resize(self, part: str, num_bytes: int) -> None:
        """`part` holds `num_bytes` from now on."""
        self.check(part, num_bytes)
        self.parts[part] = num_bytes

    def check(self, part: str, num_bytes: int) -> None:
        """Whether `part` could hold `num_bytes` in place of what it holds."""
        if self.limit is None:
            return
        free = self.limit - self.used + self.parts.get(part, 0)
        if num_bytes > free:
            raise OutOfMemory(part, required=num_bytes, free=free, limit=self.limit)


class Arena:
    """One block that grows to the largest demand and stays. Calls within calls stack up in it: each takes the bytes above its
    caller's. A call that does not fit while others are running gets a block of its own; the next outermost call finds one block
    that is large enough for all of them. A call `above` leaves alone what the last outermost one had."""

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._block = host_buffer(0)
        self._tops: list[int] = [0]  # bytes in use below each running call
        self._last = 0  # bytes of the last outermost call that was not above another
        self._demand = 0

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def enter(self, num_bytes: int, *, above: bool = False) -> NDArray[np.uint8]:
        """Memory of one call, until `leave`. Its content is whatever was there."""
        bottom = align(self._last if above else self._tops[-1])
        top = bottom + num_bytes
        if len(self._tops) == 1 and not above:
            self._last = top
        if len(self._tops) == 1 and max(top, self._demand) > self._block.nbytes:
            self._grow(max(top, self._demand))
        if top <= self._block.nbytes:
            block = self._block[bottom:top]
        else:
            self._account.check("arena", max(top, self._block.nbytes + num_bytes))
            block = host_buffer(num_bytes)
        self._tops.append(top)
        self._demand = max(self._demand, top)
        return block

    def _grow(self, num_bytes: int) -> None:
        self._account.check("arena", num_bytes)
        self._block = host_buffer(0)  # the old block goes before the new one comes
        self._account.resize("arena", 0)
        self._block = host_buffer(num_bytes)
        self._account.resize("arena", num_bytes)

    def leave(self) -> None:
        self._tops.pop()

    def reserve(self, num_bytes: int) -> None:
        """Grow now rather than at the first call that needs it."""
        self.enter(num_bytes)
        self.leave()


def shares_memory(array: NDArray[Any], block: NDArray[np.uint8]) -> bool:
    return block.nbytes > 0 and np.may_share_memory(array, block)
