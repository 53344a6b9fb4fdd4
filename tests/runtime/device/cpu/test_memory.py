from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.device.cpu.device import CpuDevice
from runtime.device.cpu.memory import HUGE_PAGE, address_of, host_buffer, sparse_buffer, use_huge_pages
from runtime.errors import OutOfMemory


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, 5 << 20])
def test_host_buffers_are_aligned_and_zero(num_bytes: int) -> None:
    buffer = host_buffer(num_bytes)
    assert buffer.nbytes == num_bytes and buffer.ctypes.data % 64 == 0 and not buffer.any()
    buffer[:] = 1


@pytest.mark.parametrize("allocate", [host_buffer, sparse_buffer])
def test_more_than_there_is_is_an_error(allocate: Any) -> None:
    with pytest.raises(OutOfMemory, match="host buffer needs"):
        allocate(1 << 60)


def resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_written_into_sparse_memory_takes_small_pages_and_stays() -> None:
    """A byte in each huge page takes a small page. Afterwards huge pages change no value, where the system has them."""
    before = resident_bytes()
    buffer = sparse_buffer(32 * HUGE_PAGE)
    buffer[::HUGE_PAGE] = np.arange(32)
    assert resident_bytes() - before < HUGE_PAGE
    use_huge_pages(buffer.base)
    assert buffer[::HUGE_PAGE].tolist() == [*range(32)] and not buffer[1::HUGE_PAGE].any()
    buffer[:] = 7
    assert (buffer == 7).all()


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
