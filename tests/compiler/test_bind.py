"""Bound weights are stored in a mapped file, in one block of the host's memory, or in the memory of another device."""

from __future__ import annotations

import numpy as np

from compiler.bind import _resident, _side_by_side, bind_weights, prepared_weights
from compiler.driver import compile_module
from compiler.frontend.layers.nn import Net
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.types import tensor
from compiler.ops.elementwise import ADD, EXP, MULTIPLY
from deploy.bench.synthetic import RandomWeights
from runtime.device.cpu.device import CpuDevice
from runtime.session import Session
from tests.runtime.device.opaque import OpaqueDevice, OpaqueTensor


def test_what_is_mapped_is_copied_only_where_kernels_read_other_memory_faster() -> None:
    mapped = {"w": np.arange(1000, dtype=np.float32), "b": np.zeros((0, 3), np.int8), "s": np.ones(5, np.float16)}
    assert _resident(CpuDevice(1), mapped) is mapped
    device = OpaqueDevice(1)
    for name, copy in _resident(device, mapped).items():
        assert isinstance(copy, OpaqueTensor)
        np.testing.assert_array_equal(device.download(copy), mapped[name])


def test_what_is_kept_in_no_file_lies_in_one_block() -> None:
    """Weights that are stored in no file are copied into one block of memory, where each starts at a cache line. The arrays from which they
    were copied may then be overwritten."""
    made = [[("a", np.arange(7, dtype=np.uint8)), ("b", np.full((2, 3), 0.5, np.float32))], [("c", np.zeros((0, 4), np.int32))]]
    kept = _side_by_side(CpuDevice(1), made, 128)
    for name, value in (pair for group in made for pair in group):
        np.testing.assert_array_equal(kept[name], value)
        assert kept[name].dtype == value.dtype and not np.shares_memory(kept[name], value)
    assert kept["b"].ctypes.data - kept["a"].ctypes.data == 64 and kept["a"].ctypes.data % 64 == 0


def test_a_weight_without_axes_stays_one() -> None:
    """One weight is read as it is, the other one while it is prepared. NumPy's function for row-major arrays would add an axis to both."""
    net, x = Net({"plain": DType.BF16, "changed": DType.BF16}), Var("x", tensor((3,), DType.F32))
    with net.function("main", [x]):
        plain, changed = (net.as_f32(net.weight(name)) for name in ("plain", "changed"))
        net.builder.returns(net.call(ADD, net.call(MULTIPLY, x, plain), net.call(EXP, changed)))
    executable, source = compile_module(net.builder.finish()), RandomWeights({"plain": (), "changed": ()})
    assert [array.shape for _, array in prepared_weights(executable, "main", source)] == [(), ()]
    session = Session(executable)
    bind_weights(session, executable, "main", source)
    found = session.call("main", np.float32([0, 1, 2]))
    np.testing.assert_allclose(found, np.e + np.arange(3), rtol=1e-6)
