"""Aligned host memory, and the addresses of arrays."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import OutOfMemory
from runtime.sections import ALIGNMENT

HUGE_PAGE = 2 << 20


def host_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed memory at a multiple of 64 bytes. Large blocks use huge pages where the system has them. Pages take no memory before
    they are touched."""
    alignment = HUGE_PAGE if num_bytes >= 2 * HUGE_PAGE else ALIGNMENT
    try:
        block = np.zeros(num_bytes + alignment, np.uint8) if alignment == ALIGNMENT else _mapped(num_bytes + alignment)
    except (MemoryError, OSError, ValueError, OverflowError) as error:
        raise OutOfMemory("host buffer", required=num_bytes) from error
    start = -block.ctypes.data % alignment
    return block[start : start + num_bytes]


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


_first_byte, _address = ctypes.c_char.from_buffer, ctypes.addressof


def address_of(array: Any) -> int:
    """Return the same address as `array.ctypes.data`, four times as fast if the memory is writable and compact. Return 0 for an empty
    array, which has no bytes to point at."""
    try:
        return _address(_first_byte(array))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data if array.size else 0
