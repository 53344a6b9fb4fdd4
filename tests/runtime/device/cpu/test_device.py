from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.device.base import Device
from runtime.device.cpu.device import CpuDevice
from runtime.errors import OutOfMemory

DEVICE: Device = CpuDevice(1)  # what the type checker holds against the protocol


def test_tensors_lie_in_their_memory() -> None:
    memory = DEVICE.allocate(256)
    half = DEVICE.part(memory, 128, 256)
    DEVICE.copy(DEVICE.tensor(half, 64, (2, 3), np.dtype(np.int32)), np.arange(6, dtype=np.int32).reshape(2, 3))
    whole = DEVICE.download(DEVICE.tensor(memory, 0, (64,), np.dtype(np.int32)))
    assert whole[48:54].tolist() == [0, 1, 2, 3, 4, 5] and not whole[:48].any() and half.num_bytes == 128


def test_only_what_lies_in_a_memory_is_copied_out_of_it() -> None:
    memory = DEVICE.allocate(64)
    inside, outside = DEVICE.tensor(memory, 0, (16,), np.dtype(np.float32)), DEVICE.empty((16,), np.dtype(np.float32))
    kept = DEVICE.kept(inside, memory)
    assert kept is not inside and not np.shares_memory(DEVICE.download(kept), DEVICE.download(inside))
    assert DEVICE.kept(outside, memory) is outside
    assert DEVICE.kept(inside, DEVICE.part(memory, 0, 0)) is inside, "no byte of it is used for something else"


def test_the_host_and_the_device_share_memory() -> None:
    """Neither direction copies: a step costs nothing for the seam."""
    array = np.zeros(3, ml_dtypes.bfloat16)
    assert DEVICE.upload(array) is array and DEVICE.download(array) is array


def test_an_index_is_copied_along_any_axis() -> None:
    for axis in range(3):
        tensor = DEVICE.upload(np.arange(27).reshape(3, 3, 3).copy())
        DEVICE.copy_index(tensor, axis, 2, 0)
        moved = np.moveaxis(DEVICE.download(tensor), axis, 0)
        assert np.array_equal(moved[0], moved[2]) and not np.array_equal(moved[1], moved[2])


def test_a_heap_is_written_by_the_host() -> None:
    words, _ = DEVICE.heap([1, -2, 2**40])
    words[1] = 7
    assert words.tolist() == [1, 7, 2**40]


def test_an_array_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="result needs"):
        DEVICE.empty((1 << 40, 1 << 20), np.dtype(np.float32))
