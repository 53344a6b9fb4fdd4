from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.device.cpu.memory import address_of, host_buffer
from runtime.errors import OutOfMemory


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, 5 << 20])
def test_host_buffers_are_aligned_and_zero(num_bytes: int) -> None:
    buffer = host_buffer(num_bytes)
    assert buffer.nbytes == num_bytes and buffer.ctypes.data % 64 == 0 and not buffer.any()
    buffer[:] = 1


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match="host buffer needs"):
        host_buffer(1 << 60)


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
