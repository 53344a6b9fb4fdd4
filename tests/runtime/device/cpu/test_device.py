from __future__ import annotations

import ml_dtypes
import numpy as np

from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.device import CpuDevice
from runtime.device.cpu.numa import Placement

DEVICE = CpuDevice(1)


def test_the_host_and_the_device_share_memory() -> None:
    """On the CPU, upload and download return the given array itself, not a copy."""
    array = np.zeros(3, ml_dtypes.bfloat16)
    assert DEVICE.upload(array) is array and DEVICE.download(array) is array


def test_arrays_of_the_host_are_read_where_they_are_unless_there_are_several_memory_nodes() -> None:
    device, core = CpuDevice(1), available_cores()[0]
    assert device.limits.reads_host_arrays
    device._placement = Placement((core, core), (0, 1))
    assert not device.limits.reads_host_arrays
    source = np.arange(1000, dtype=np.float32)
    target = device.empty(source.shape, source.dtype)
    device.copy_weight(target, source)
    np.testing.assert_array_equal(target, source)
