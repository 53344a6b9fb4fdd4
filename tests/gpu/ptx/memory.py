"""Memory that kernels and copies access: device memory and pinned host memory, with a record of every allocation.

One block of host memory stores the contents of both kinds. Device pointers come from a separate range of addresses that is not mapped, so a
host that dereferences a device pointer crashes, as with a real card. A pointer to pinned memory is a host pointer.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.faults import Fault

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
DEVICE_BASE = 0x3000_0000_0000  # an address where systems do not map user memory by themselves
UNWRITTEN = 0xFF  # value of every byte of fresh memory: a NaN in every float type
ALIGNMENT = 256
MANY = -1  # stands for threads of several blocks, and MANY - 1 - b for several threads of block b


class History:
    """The accesses of launches to memory. For each piece of a few bytes: who wrote it last and who has read it since, as the number of a
    thread in its launch (see also MANY), and when; and when a thread last read it as a constant. Time goes on from launch to launch."""

    def __init__(self) -> None:
        self.time = 1
        self.cover(0)

    def cover(self, num_pieces: int) -> None:
        """Make room for so many pieces before a launch, which needs nothing that earlier launches noted."""
        self.writer, self.write_time, self.reader, self.read_time, self.constant_time = (np.zeros(num_pieces, np.int32) for _ in range(5))


class Memory:
    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self.num_bytes = num_bytes
        self._map = _mapped(num_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.words = {bits: self.bytes.view(dtype) for bits, dtype in UNSIGNED.items()}
        # For each 4 bytes, the number of the launch that wrote them last; 0: none. The system provides memory for the parts in use only.
        self.writers = np.frombuffer(_mapped(num_bytes), np.uint32)
        self.history = History()
        self.top = 0  # where the last allocation ended that any launch can have accessed
        self.host_base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._live: dict[int, int] = {}  # offset -> size of each live allocation
        self._sorted: list[int] = []  # begin, end, begin, end, ... of the live allocations, ascending
        self._edges = np.zeros(0, np.int64)  # `_sorted` as a NumPy array
        self._free: list[tuple[int, int]] = [(ALIGNMENT, num_bytes)]

    # --- allocations ---------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, *, pinned: bool = False) -> int | None:
        """Return the address of a new allocation, or None if there is no room."""
        # leave a gap after the allocation, so that an overrun hits no other allocation
        room = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= room:
                self._free[index] = (begin + room, end)
                self._live[begin] = num_bytes
                self.top = max(self.top, begin + room)
                self._sort()
                self.bytes[begin : begin + num_bytes] = UNWRITTEN
                return begin + (self.host_base if pinned else DEVICE_BASE)
        return None

    def free(self, address: int) -> bool:
        offset = self.offset(address)
        if offset not in self._live:
            return False
        size = self._live.pop(offset)
        room = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._sort()
        self._free = _joined(sorted([*self._free, (offset, offset + room)]))
        return True

    def allocation(self, address: int) -> tuple[int, int] | None:
        """Return address and size of the allocation that contains an address, or None."""
        offset = self.offset(address)
        for begin, size in self._live.items():
            if begin <= offset < begin + max(size, 1):
                return address - offset + begin, size
        return None

    @contextmanager
    def without(self, addresses: Sequence[int]) -> Generator[None]:
        """Let accesses to these allocations fail inside the `with`, as if they did not exist."""
        if not addresses:
            yield
            return
        hidden = {offset: self._live.pop(offset) for offset in map(self.offset, addresses)}
        self._sort()
        try:
            yield
        finally:
            self._live |= hidden
            self._sort()

    @property
    def allocated(self) -> int:
        return sum(self._live.values())

    @property
    def available(self) -> int:
        return max((end - begin - ALIGNMENT for begin, end in self._free), default=0)

    def _sort(self) -> None:
        self._sorted = [edge for begin in sorted(self._live) for edge in (begin, begin + self._live[begin])]
        self._edges = np.array(self._sorted, np.int64)

    # --- addresses -----------------------------------------------------------------------------------------------------

    def offset(self, address: int) -> int:
        return address - (DEVICE_BASE if DEVICE_BASE <= address < DEVICE_BASE + self.num_bytes else self.host_base)

    def offsets(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Return the offsets of addresses in the backing memory. Raise a fault for the first address that is misaligned or outside all
        allocations."""
        if addresses.size == 0:
            return addresses
        if size > 1 and np.bitwise_or.reduce(addresses) & (size - 1):
            wrong = int(np.flatnonzero(addresses & (size - 1))[0])
            raise AddressFault(wrong, f"the address {addresses[wrong]:#x} is not a multiple of {size}")
        low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
        base = DEVICE_BASE if low >= DEVICE_BASE and high < DEVICE_BASE + self.num_bytes else self.host_base
        if base <= low and high < base + self.num_bytes:
            place = bisect.bisect_right(self._sorted, low - base)
            if place % 2 and high - base + size <= self._sorted[place]:
                return addresses - base
            offsets = addresses - base
        else:
            on_device = (addresses >= DEVICE_BASE) & (addresses < DEVICE_BASE + self.num_bytes)
            offsets = addresses - np.where(on_device, DEVICE_BASE, self.host_base)
        places = np.searchsorted(self._edges, offsets, side="right")
        inside = places % 2 == 1
        inside[inside] = offsets[inside] + size <= self._edges[places[inside]]
        if not inside.all():
            wrong = int(np.flatnonzero(~inside)[0])
            raise AddressFault(wrong, f"the {size} bytes at {addresses[wrong]:#x} are not all within one allocation")
        return offsets

    def span(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the backing memory of the bytes that a copy accesses. They must lie within one allocation."""
        offset = self.offset(address)
        place = bisect.bisect_right(self._sorted, offset)
        if num_bytes and not (place % 2 and offset + num_bytes <= self._sorted[place]):
            raise AddressFault(0, f"the {num_bytes} bytes at {address:#x} are not all within one allocation")
        return self.bytes[offset : offset + num_bytes]


class AddressFault(Fault):
    """A fault for a bad address. `position` is the address's index among the addresses of the access."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position


def _mapped(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for begin, end in spans:
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result
