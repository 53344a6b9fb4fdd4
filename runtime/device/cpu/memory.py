"""Aligned host memory, and the addresses of arrays."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import OutOfMemory
from runtime.sections import ALIGNMENT

HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # advice to Linux 6.1 and later to make a huge page of small pages now; Python has no name for it

_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mincore = _libc.madvise, _libc.mincore
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def host_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed memory at a multiple of 64 bytes. Large blocks use huge pages where the system has them. Pages take no memory before
    they are touched. Raise OutOfMemory if the system refuses."""
    return _buffer(num_bytes, huge=True)


def sparse_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory as `host_buffer` does, but in small pages. `use_huge_pages`, called for the array's base, later makes huge pages of
    the parts that are at least half written. Huge pages from the start would cost much: the first token of a sequence writes to two places
    per layer. In a model with 30 layers, this took 126 MB of huge pages, and 0.28 s on a virtual machine."""
    return _buffer(num_bytes, huge=False)


def use_huge_pages(block: NDArray[np.uint8]) -> None:
    """Make a huge page of each part of a block that is at least half written. Other parts keep small pages, because huge pages would more
    than double their memory; call this again when more has been written. Other threads may read and write meanwhile. Where the system
    refuses, pages stay as they are."""
    address = block.ctypes.data
    begin, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + block.nbytes) // HUGE_PAGE * HUGE_PAGE
    if begin < end and sys.platform == "linux":
        for first, last in _runs(_is_dense(begin, end)):
            run, num_bytes = begin + first * HUGE_PAGE, (last - first) * HUGE_PAGE
            _madvise(run, num_bytes, mmap.MADV_HUGEPAGE)
            _madvise(run, num_bytes, MADV_COLLAPSE)


def _is_dense(begin: int, end: int) -> NDArray[np.bool_]:
    """Return for each huge page from `begin` to `end` whether at least half of its small pages take memory."""
    present = np.zeros((end - begin) // mmap.PAGESIZE, np.uint8)
    if _mincore(begin, end - begin, present.ctypes.data):
        present[:] = 0
    per_huge_page = HUGE_PAGE // mmap.PAGESIZE
    return (present & 1).reshape(-1, per_huge_page).sum(1) >= per_huge_page / 2


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges in which all flags are set."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(first), int(last)) for first, last in changes.reshape(-1, 2)]


def _buffer(num_bytes: int, *, huge: bool) -> NDArray[np.uint8]:
    """Allocate zeroed memory. `huge`: whether a large block uses huge pages from the start. Raise OutOfMemory if the system gives no
    memory."""
    alignment = HUGE_PAGE if num_bytes >= 2 * HUGE_PAGE else ALIGNMENT
    try:
        block = np.zeros(num_bytes + alignment, np.uint8) if alignment == ALIGNMENT else _mapped(num_bytes + alignment, huge=huge)
    except (MemoryError, OSError, ValueError, OverflowError) as error:
        raise OutOfMemory("host buffer", required=num_bytes) from error
    start = -block.ctypes.data % alignment
    return block[start : start + num_bytes]


def _mapped(num_bytes: int, *, huge: bool) -> NDArray[np.uint8]:
    """Map zeroed memory, and tell Linux whether to use huge pages for it."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # Linux was built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


_first_byte, _address = ctypes.c_char.from_buffer, ctypes.addressof


def address_of(array: Any) -> int:
    """Return the same address as `array.ctypes.data`, four times as fast if the memory is writable and compact. Return 0 for an empty
    array, which has no bytes to point at."""
    try:
        return _address(_first_byte(array))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data if array.size else 0
