"""Tests which GPU a device opens, and the error if it can open none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.device.cuda.capability import check_target
from runtime.device.cuda.device import CudaDevice
from runtime.errors import DeviceFault, IncompatibleExecutable, OutOfMemory
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

OPEN = """
from runtime.device.cuda.card import Card
from runtime.errors import NoDevice
try:
    print(Card({}).name)
except NoDevice as error:
    print(error)
"""


def opened(environment: dict[str, str], number: int = 0) -> str:
    """Start a process that opens the GPU with this number, and return what the process prints."""
    command = [sys.executable, "-c", OPEN.format(number)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True, timeout=120)
    return result.stdout.strip()


@needs_pycuda
def test_without_a_driver_it_is_said_what_to_install(tmp_path: Path) -> None:
    """If the machine has no driver, the error says what to install. The test hides a driver that may be installed."""
    (tmp_path / "libcuda.so.1").touch()  # the loader stops its search at this file, although it is no library
    said = opened({"LD_LIBRARY_PATH": str(tmp_path)})
    assert "libcuda.so.1" in said and "install '.[cuda]'" in said and "driver" in said


@needs_pycuda
def test_an_old_driver_is_refused_with_both_versions(software_gpu: SoftwareGpu) -> None:
    said = opened(software_gpu.environment(driver=11080))
    assert said == "the driver is for CUDA 11.8; expected 12.4 or newer: update it"


@needs_pycuda
def test_a_gpu_that_is_not_there_is_refused(software_gpu: SoftwareGpu) -> None:
    environment = software_gpu.environment(cards=2)
    assert "there is no GPU 2; this machine has 2, numbered from 0" in opened(environment, 2)
    assert "no GPU" not in opened(environment, 1)


def test_pycuda_is_imported_by_those_alone_who_open_a_gpu() -> None:
    code = "import sys, deploy.worker, deploy.serve, compiler.driver, runtime.device.cuda.device; print('pycuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@needs_pycuda
def test_memory_that_the_card_has_not_is_refused(software_gpu: SoftwareGpu) -> None:
    device = CudaDevice()
    with pytest.raises(OutOfMemory, match=r"memory on GPU 0 needs 1,099,511,627,776 bytes, [\d,]+ are free;"):
        device.allocate(1 << 40)
    assert device.download(device.upload(np.arange(3))).tolist() == [0, 1, 2], "the device should still work"


@needs_pycuda
def test_a_card_that_failed_while_it_was_idle_is_named(software_gpu: SoftwareGpu) -> None:
    """An idle worker asks its GPU for nothing but its memory and its times, so this is where a card that fell off the bus is noticed."""
    from tests.gpu.driver.calls import Result
    from tests.gpu.driver.card import machine, note_fault

    device = CudaDevice()
    for context in machine.contexts.values():
        note_fault(context, Result.ILLEGAL_ADDRESS, "a fault of the card")
    with pytest.raises(DeviceFault, match=r"GPU 0 \(software GPU 0\), before any run: its free memory: .*illegal"):
        _ = device.card_usage


@needs_pycuda
def test_an_index_is_read_and_written_along_any_axis(software_gpu: SoftwareGpu) -> None:
    device = CudaDevice()
    for axis in range(3):
        expected = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
        tensor = device.upload(expected.copy())
        data = device.read_index(tensor, axis, 1)
        assert data == np.moveaxis(expected, axis, 0)[1].tobytes()
        device.write_index(tensor, axis, 0, memoryview(data))
        np.moveaxis(expected, axis, 0)[0] = np.moveaxis(expected, axis, 0)[1]
        assert np.array_equal(device.download(tensor), expected)


@needs_pycuda
def test_memory_comes_back_with_its_last_tensor(software_gpu: SoftwareGpu) -> None:
    device = CudaDevice()
    before = device.limits.free_bytes
    tensor = device.tensor(device.allocate(1 << 20), 64, (4,), np.dtype(np.float32))
    assert device.limits.free_bytes <= before - (1 << 20)
    part = tensor.reshape((2, 2))
    del tensor
    assert device.limits.free_bytes <= before - (1 << 20)
    del part
    assert device.limits.free_bytes == before


@pytest.mark.parametrize(("target", "capability"), [("sm_80", (8, 0)), ("sm_80", (9, 0)), ("sm_89", (12, 0)), ("sm_90a", (9, 0))])
def test_code_runs_on_its_generation_and_on_those_that_follow(target: str, capability: tuple[int, int]) -> None:
    check_target(f"nvptx64:+ptx74,+{target}@nvidia-cuda", capability)


@pytest.mark.parametrize(("target", "capability"), [("sm_89", (8, 0)), ("sm_90a", (10, 0)), ("sm_100a", (9, 0))])
def test_code_of_another_generation_is_refused(target: str, capability: tuple[int, int]) -> None:
    with pytest.raises(
        IncompatibleExecutable, match=rf"{target}@nvidia-cuda, and this GPU has compute capability {capability[0]}\.{capability[1]}"
    ):
        check_target(f"nvptx64:+ptx74,+{target}@nvidia-cuda", capability)


def test_no_generation_is_no_target() -> None:
    with pytest.raises(IncompatibleExecutable, match="names no generation"):
        check_target("nvptx64:", (9, 0))
