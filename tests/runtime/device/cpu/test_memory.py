from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.device.cpu.device import CpuDevice
from runtime.device.cpu.memory import HUGE_PAGE, address_of, host_buffer, sparse_buffer, use_huge_pages
from runtime.errors import OutOfMemory
from tests.process_states import resident_bytes


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, 5 << 20])
def test_host_buffers_are_aligned_and_zero(num_bytes: int) -> None:
    buffer = host_buffer(num_bytes)
    assert buffer.nbytes == num_bytes and buffer.ctypes.data % 64 == 0 and not buffer.any()
    buffer[:] = 1


@pytest.mark.parametrize("allocate", [host_buffer, sparse_buffer])
def test_more_than_there_is_is_an_error(allocate: Any) -> None:
    with pytest.raises(OutOfMemory, match="host buffer needs"):
        allocate(1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_written_into_sparse_memory_takes_small_pages_and_stays() -> None:
    """Of each huge page into which a byte is written, only a small page takes memory. If huge pages replace them later, where the system
    has them, no value changes."""
    before = resident_bytes()
    buffer = sparse_buffer(32 * HUGE_PAGE)
    buffer[::HUGE_PAGE] = np.arange(32)
    assert resident_bytes() - before < HUGE_PAGE
    use_huge_pages(buffer.base)
    assert buffer[::HUGE_PAGE].tolist() == [*range(32)] and not buffer[1::HUGE_PAGE].any()
    buffer[:] = 7
    assert (buffer == 7).all()


def huge_bytes(buffer: np.ndarray) -> int:
    """Return how many bytes of a buffer's mapping are in huge pages."""
    begin, total, is_inside = buffer.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) < begin + buffer.nbytes and begin < int(found[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            total += 1024 * int(line.split()[1])
    return total


def has_huge_pages() -> bool:
    """Return whether this system collapses a written part into a huge page."""
    if sys.platform != "linux":
        return False
    buffer = sparse_buffer(2 * HUGE_PAGE)
    buffer[:] = 1
    use_huge_pages(buffer.base)
    return huge_bytes(buffer) > 0


@pytest.mark.skipif(not has_huge_pages(), reason="needs Linux 6.1 with transparent huge pages")
def test_parts_become_huge_that_are_at_least_half_written() -> None:
    """Each layer of a cache begins with written pages, and untouched ones follow. All written parts become huge, also those behind
    untouched ones. A part with few written pages stays small, and an untouched part begins small."""
    whole = sparse_buffer(14 * HUGE_PAGE)
    buffer = whole[HUGE_PAGE:-HUGE_PAGE]  # the kernel does not join its mapping with mappings beyond `whole`
    parts = buffer.reshape(12, HUGE_PAGE)
    parts[[0, 1, 5, 9]] = 1
    parts[6, HUGE_PAGE // 2 :] = 2
    parts[3, : HUGE_PAGE // 2 - 8192] = 3
    parts[10, 0] = 4
    assert huge_bytes(buffer) == 0
    use_huge_pages(buffer)
    assert huge_bytes(buffer) == 5 * HUGE_PAGE
    assert (parts[[0, 1, 5, 9]] == 1).all() and (parts[6, HUGE_PAGE // 2 :] == 2).all() and not parts[6, : HUGE_PAGE // 2].any()
    parts[4, 0] = 5  # not touched before
    parts[10] = 4
    assert huge_bytes(buffer) == 5 * HUGE_PAGE
    use_huge_pages(buffer)
    assert huge_bytes(buffer) == 6 * HUGE_PAGE and (parts[10] == 4).all() and parts[4, 0] == 5


def test_a_device_settles_the_sparse_memory_that_is_left() -> None:
    device = CpuDevice(1)
    kept, gone = device.allocate(8 * HUGE_PAGE, sparse=True), device.allocate(8 * HUGE_PAGE, sparse=True)
    tensor = device.tensor(kept, 64, (1 << 20,), np.dtype(np.int32))
    tensor[:] = 3
    del kept, gone
    settled: list[int] = []
    device_module = sys.modules[CpuDevice.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "use_huge_pages", lambda block: (settled.append(block.nbytes), use_huge_pages(block)))
        device.settle()
    assert len(settled) == 1 and settled[0] >= 8 * HUGE_PAGE and (tensor == 3).all()
    device.close()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3),
        np.zeros(0),
        np.zeros(()),
        np.zeros(3, ml_dtypes.bfloat16),
        np.frombuffer(b"read-only", np.uint8),
        np.zeros((4, 4))[1:],
    ],
)
def test_address(array: np.ndarray) -> None:
    assert address_of(array) == (array.ctypes.data if array.size else 0)
