"""Count the bytes of each part of the runtime, and hold the memory of the planned tensors: an arena that all functions share, and a block
for calls in parts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from runtime.device.base import Device, Memory
from runtime.errors import OutOfMemory
from runtime.sections import align


class MemoryAccount:
    """Counts bytes by part. A request that would exceed `limit` is refused before anything is allocated. A limit of None means no limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.parts: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self.parts.values())

    def resize(self, part: str, num_bytes: int) -> None:
        """Set the number of bytes that `part` holds. Raise OutOfMemory if all parts together would exceed the limit."""
        self.check(part, num_bytes)
        self.parts[part] = num_bytes

    def check(self, part: str, num_bytes: int) -> None:
        """Raise OutOfMemory if all parts together would exceed the limit once `part` holds `num_bytes`."""
        if self.limit is None:
            return
        free = self.limit - self.used + self.parts.get(part, 0)
        if num_bytes > free:
            raise OutOfMemory(part, required=num_bytes, free=free, limit=self.limit)


class Arena:
    """One block of memory that grows to the largest demand and never shrinks. Nested calls form a stack in it: each uses the bytes after
    its caller's bytes. A nested call that does not fit gets a separate block, and the next outermost call grows the arena to the largest
    demand so far. A call with `keep_last` uses the bytes after those of the last outermost call without `keep_last`, so the results
    of that call stay intact."""

    def __init__(self, account: MemoryAccount, device: Device) -> None:
        self._account = account
        self._device = device
        self._use(device.allocate(0))
        self._tops: list[int] = [0]  # 0, and then, for each running call, the end of its bytes in the arena
        self._last = 0  # bytes of the last outermost call without `keep_last`
        self._demand = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def enter(self, num_bytes: int, *, keep_last: bool = False) -> Memory:
        """Reserve memory for a call until `leave`, and return it. The memory is not initialised. Raise OutOfMemory if it exceeds the limit
        or the device's memory."""
        tops = self._tops
        outermost = len(tops) == 1
        bottom = 0 if outermost and not keep_last else align(self._last if keep_last else tops[-1])
        top = bottom + num_bytes
        if outermost:
            if not keep_last:
                self._last = top
            if top > self._num_bytes or self._demand > self._num_bytes:
                self._grow(max(top, self._demand))
        memory = self._within(bottom, top) if top <= self._num_bytes else self._apart(top, num_bytes)
        tops.append(top)
        if top > self._demand:
            self._demand = top
        return memory

    def _within(self, bottom: int, top: int) -> Memory:
        """Return the bytes `bottom` to `top` - 1 of the arena."""
        if (bottom, top) != self._span:
            self._span, self._view = (bottom, top), self._device.part(self._block, bottom, top)
        return self._view

    def _apart(self, top: int, num_bytes: int) -> Memory:
        """Allocate a separate block for a nested call that does not fit into the arena."""
        self._account.check("arena", max(top, self._num_bytes + num_bytes))
        return self._device.allocate(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Replace the block by one of this size. Raise OutOfMemory if the limit or the device does not allow it."""
        self._account.check("arena", num_bytes)
        self._use(self._device.allocate(0))  # free the old block before the new one is allocated
        self._account.resize("arena", 0)
        self._use(self._device.allocate(num_bytes))
        self._account.resize("arena", num_bytes)

    def _use(self, block: Memory) -> None:
        self._block, self._num_bytes = block, block.num_bytes
        # Span and view of the last call in the block, reused if the next call has the same span.
        self._span, self._view = (0, 0), self._device.part(block, 0, 0)

    def again(self, num_bytes: int) -> Memory | None:
        """Do the same as `enter` for an outermost call, but faster, if the last such call needed equally many bytes; otherwise return None.
        The caller does not call `leave`, so no other call may use the arena while this one runs."""
        if self._span != (0, num_bytes) or len(self._tops) > 1 or self._demand > self._num_bytes:
            return None
        self._last = num_bytes
        return self._view

    def leave(self) -> None:
        self._tops.pop()

    def reserve(self, num_bytes: int) -> None:
        """Grow the arena to at least this size now, so that the first call need not grow it."""
        self.enter(num_bytes)
        self.leave()


class Aside:
    """The block of memory that a call in parts uses instead of the arena, since other calls use the arena between two parts. The block
    grows to the largest demand and never shrinks. One call at a time uses it."""

    def __init__(self, account: MemoryAccount, device: Device) -> None:
        self._account = account
        self._device = device
        self._block = device.allocate(0)
        self._is_used = False

    @contextmanager
    def entered(self, num_bytes: int) -> Generator[Memory]:
        """Reserve the memory for a call inside the `with`. The memory is not initialised. Raise OutOfMemory if it exceeds the limit or the
        device's memory."""
        assert not self._is_used, "two calls in parts at the same time"
        if num_bytes > self._block.num_bytes:
            self._account.check("calls in parts", num_bytes)
            self._block = self._device.allocate(0)  # free the old block before the new one is allocated
            self._account.resize("calls in parts", 0)
            self._block = self._device.allocate(num_bytes)
            self._account.resize("calls in parts", num_bytes)
        self._is_used = True
        try:
            yield self._block
        finally:
            self._is_used = False
