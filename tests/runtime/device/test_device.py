"""The device protocol. Each device must pass these tests; here the CPU, the opaque device, a software GPU and two of them together do."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.device.base import Device
from runtime.device.cpu.device import CpuDevice
from runtime.device.cuda.device import CudaDevice
from runtime.device.cuda.ranks import CudaRanks
from runtime.device.registry import DEVICES, open_device
from runtime.errors import IncompatibleExecutable, OutOfMemory
from runtime.executable import ExecutableMeta, HostCode
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu
from tests.runtime.device.opaque import OpaqueDevice

# These annotations make the type checker compare each device with the protocol.
CPU: Device = CpuDevice(1)
OPAQUE: Device = OpaqueDevice(1)

PTX = b".version 7.4\n.target sm_80\n.address_size 64\n"
I32, F32 = np.dtype(np.int32), np.dtype(np.float32)


@pytest.fixture(params=["cpu", "opaque", *(pytest.param(name, marks=needs_pycuda) for name in ("cuda", "ranks"))])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    if request.param in ("cpu", "opaque"):
        return {"cpu": CPU, "opaque": OPAQUE}[request.param]
    software_gpu: SoftwareGpu = request.getfixturevalue("software_gpu")
    software_gpu.has_cards(2, monkeypatch)
    gpu: Device = CudaDevice()
    ranks: Device = CudaRanks([CudaDevice(0), CudaDevice(1)])
    return ranks if request.param == "ranks" else gpu


def read(device: Device, tensor: Any) -> NDArray[Any]:
    return device.download(tensor).copy()


def test_tensors_lie_in_their_memory(device: Device) -> None:
    memory = device.allocate(256)
    half = device.part(memory, 128, 256)
    device.copy(device.tensor(half, 64, (2, 3), I32), np.arange(6, dtype=np.int32).reshape(2, 3))
    whole = read(device, device.tensor(memory, 0, (64,), I32))
    assert whole[48:54].tolist() == [0, 1, 2, 3, 4, 5] and not whole[:48].any() and half.num_bytes == 128


def test_a_tensor_has_a_shape_and_a_type(device: Device) -> None:
    tensor = device.upload(np.arange(6, dtype=np.int32))
    assert isinstance(tensor, device.tensor_type)
    assert (tensor.shape, tensor.dtype, tensor.size, tensor.nbytes) == ((6,), I32, 6, 24)
    assert read(device, tensor.reshape((2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_only_what_lies_in_a_memory_is_copied_out_of_it(device: Device) -> None:
    memory = device.allocate(64)
    inside, outside = device.tensor(memory, 0, (16,), F32), device.empty((16,), F32)
    kept = device.kept(inside, memory)
    device.copy(inside, np.ones(16, np.float32))
    assert kept is not inside and not read(device, kept).any()
    assert device.kept(outside, memory) is outside
    assert device.kept(inside, device.part(memory, 0, 0)) is inside, "expected no copy, because the memory does not overlap"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_])
def test_transfers_keep_every_bit(device: Device, dtype: Any) -> None:
    array = np.random.default_rng(0).integers(0, 2, (3, 5, 4)).astype(dtype)
    tensor = device.upload(array)
    assert read(device, tensor).tobytes() == array.tobytes() and read(device, tensor).dtype == dtype
    for copy in (device.copy, device.copy_weight):
        target = device.empty(array.shape, np.dtype(dtype))
        copy(target, tensor)
        assert read(device, target).tobytes() == array.tobytes()


def test_a_tensor_is_writable_if_its_array_was(device: Device) -> None:
    array = np.zeros(3, np.float32)
    assert device.is_writable(device.upload(array))
    array.flags.writeable = False
    assert not device.is_writable(device.upload(array))


def test_elements_convert_when_they_are_copied(device: Device) -> None:
    target = device.empty((3,), F32)
    device.copy(target, np.array([1, 2, 3], np.float64))
    assert read(device, target).tolist() == [1, 2, 3]
    with pytest.raises(TypeError):
        device.copy(device.empty((3,), I32), np.ones(3, np.float32))


def test_an_index_is_copied_along_any_axis(device: Device) -> None:
    for axis in range(3):
        tensor = device.upload(np.arange(27).reshape(3, 3, 3).copy())
        device.copy_index(tensor, axis, 2, 0)
        moved = np.moveaxis(read(device, tensor), axis, 0)
        assert np.array_equal(moved[0], moved[2]) and not np.array_equal(moved[1], moved[2])


def test_an_index_is_read_and_written_along_any_axis(device: Device) -> None:
    for axis in range(3):
        expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        tensor = device.upload(expected.copy())
        data = device.read_index(tensor, axis, 1)
        assert data == np.moveaxis(expected, axis, 0)[1].tobytes() * len(device.ranks)
        device.write_index(tensor, axis, 0, memoryview(data))
        np.moveaxis(expected, axis, 0)[0] = np.moveaxis(expected, axis, 0)[1]
        assert np.array_equal(read(device, tensor), expected)


def test_a_heap_is_written_by_the_host(device: Device) -> None:
    words, _ = device.heap([1, -2, 2**40])
    words[1] = 7
    assert words.tolist() == [1, 7, 2**40]


def test_shape_functions_read_and_write_the_heap_of_the_device(device: Device, object_code: bytes, host_target: str) -> None:
    """A shape function reads and stores integers in the device's shape heap. The function `derive` of conftest.py computes 4 * n, rounded
    up to a multiple of 64, and twice that number."""
    words, handle = device.heap([17, 0, 0, 0])
    on_host = isinstance(device, CpuDevice | OpaqueDevice)
    code = device.load(object_code, host_target) if on_host else device.load(PTX, "nvptx64:+sm_80", HostCode(object_code, host_target))
    assert code.derive("derive")(handle) == 0
    assert words.tolist() == [17, 128, 256, 0]


def test_an_array_that_does_not_fit_is_refused(device: Device) -> None:
    with pytest.raises(OutOfMemory, match=r"result( on GPU 0)? needs"):
        device.empty((1 << 40, 1 << 20), F32)


def test_limits_tell_what_is_free(device: Device) -> None:
    assert device.limits.free_bytes > 0


# --- which device runs an executable -----------------------------------------------------------------------------------


def test_the_architecture_of_an_executable_opens_its_device(host_target: str) -> None:
    device = open_device(ExecutableMeta(host_target, {}, (), ()), num_threads=1)
    assert isinstance(device, CpuDevice) and device.num_threads == 1
    device.close()


def test_code_for_a_machine_without_a_device_is_refused() -> None:
    with pytest.raises(IncompatibleExecutable, match="the executable is for vax; this runtime has devices for x86_64, aarch64, nvptx64"):
        open_device(ExecutableMeta("vax:", {}, (), ()))


def test_a_row_is_all_that_a_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "vax", "tests.runtime.device.opaque")
    device = open_device(ExecutableMeta("vax:", {}, (), ()), num_threads=1)
    assert isinstance(device, OpaqueDevice)
    device.close()


def test_inputs_of_a_call_keep_their_bits_and_their_shape(device: Device) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 255, shape).astype(dtype) for shape, dtype in (((3, 5), np.int8), ((0, 4), np.int32), ((7,), np.float32))]
    for given in (arrays, arrays[::-1], [rng.random((300, 300)), *arrays], []):
        for array, tensor in zip(given, device.upload_inputs(given), strict=True):
            found = read(device, tensor)
            assert isinstance(tensor, device.tensor_type)
            assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes())


def test_an_input_that_is_kept_outlives_the_next_call(device: Device) -> None:
    (tensor,) = device.upload_inputs([np.arange(4)])
    kept = device.kept(tensor, device.allocate(0))
    device.upload_inputs([np.zeros(4, np.int64)])
    assert read(device, kept).tolist() == [0, 1, 2, 3]
