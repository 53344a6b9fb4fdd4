from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from runtime.device.cpu import device
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.device import CpuDevice
from runtime.device.cpu.numa import Placement

DEVICE = CpuDevice(1)


def test_the_host_and_the_device_share_memory() -> None:
    """On the CPU, upload and download return the given array itself, not a copy."""
    array = np.zeros(3, ml_dtypes.bfloat16)
    assert DEVICE.upload(array) is array and DEVICE.download(array) is array


def test_arrays_of_the_host_are_read_where_they_are_unless_there_are_several_memory_nodes() -> None:
    opened, core = CpuDevice(1), available_cores()[0]
    assert opened.limits.reads_host_arrays
    opened._placement = Placement((core, core), (0, 1))
    assert not opened.limits.reads_host_arrays
    source = np.arange(1000, dtype=np.float32)
    target = opened.empty(source.shape, source.dtype)
    opened.copy_weight(target, source)
    np.testing.assert_array_equal(target, source)


def placed(cores: Sequence[int]) -> Placement:
    """Place each core on a node of its own."""
    return Placement(tuple(cores), tuple(range(len(cores))))


@pytest.mark.skipif(len(available_cores()) < 2 or not hasattr(os, "sched_getaffinity"), reason="needs two cores")
def test_helpers_stay_on_their_nodes_although_nobody_pins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not pin threads. On a machine with several nodes, a helper is limited to the cores of its node all the same. The caller
    is not: it starts other threads and processes."""
    monkeypatch.setattr(Placement, "of", placed)
    cores, before = available_cores(), set(threading.enumerate())
    monkeypatch.setattr(device, "num_cores_of_affinity", lambda: len(cores))
    opened = CpuDevice(len(cores))
    helper = next(t for t in set(threading.enumerate()) - before if t.name == "relaxserve-team-1")
    deadline = time.monotonic() + 60
    while os.sched_getaffinity(helper.native_id or 0) != {cores[1]} and time.monotonic() < deadline:
        time.sleep(0.001)
    assert os.sched_getaffinity(helper.native_id or 0) == {cores[1]}
    assert not opened.limits.reads_host_arrays
    callers: list[set[int]] = []

    def call() -> None:
        opened.use_thread()
        callers.append(os.sched_getaffinity(0))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert callers == [os.sched_getaffinity(0)]
    opened.close()


@pytest.mark.parametrize("num_threads", [1, len(available_cores()) + 1])
def test_a_team_that_has_not_every_core_is_on_no_node(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two servers with half of the cores each, both would otherwise be on the first half."""
    monkeypatch.setattr(Placement, "of", placed)
    monkeypatch.setattr(device, "num_cores_of_affinity", lambda: max(2, len(available_cores())))
    opened = CpuDevice(num_threads)
    assert opened.limits.reads_host_arrays
    opened.close()


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_team_with_a_quota_is_on_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota limits the time of the cores, but not on which of them threads run."""
    monkeypatch.setattr(Placement, "of", placed)
    monkeypatch.setattr(device, "num_cores_of_affinity", lambda: len(available_cores()) + 1)
    opened = CpuDevice()
    assert opened.limits.reads_host_arrays
    opened.close()
