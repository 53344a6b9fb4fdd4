from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

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


@pytest.mark.skipif(len(available_cores()) < 2 or not hasattr(os, "sched_getaffinity"), reason="needs two cores")
def test_threads_stay_on_their_nodes_although_nobody_pins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not pin threads. On a machine with two nodes, each thread is limited to the cores of its node all the same."""
    monkeypatch.setattr(Placement, "of", lambda cores: Placement(tuple(cores), tuple(range(len(cores)))))
    cores, before = available_cores(), set(threading.enumerate())
    device = CpuDevice(2)
    (helper,) = set(threading.enumerate()) - before
    deadline = time.monotonic() + 60
    while os.sched_getaffinity(helper.native_id or 0) != {cores[1]} and time.monotonic() < deadline:
        time.sleep(0.001)
    assert os.sched_getaffinity(helper.native_id or 0) == {cores[1]}
    assert not device.limits.reads_host_arrays
    callers: list[set[int]] = []

    def call() -> None:
        device.use_thread()
        callers.append(os.sched_getaffinity(0))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert callers == [{cores[0]}]
    device.close()


def test_more_threads_than_cores_have_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(cores: Sequence[int]) -> Placement:
        raise AssertionError(cores)

    monkeypatch.setattr(Placement, "of", of)
    device = CpuDevice(len(available_cores()) + 1)
    assert device.limits.reads_host_arrays
    device.close()
