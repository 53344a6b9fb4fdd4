"""Compile LLVM IR to PTX kernels and run the kernels on software cards, without going through the driver."""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.launch import LoadedModule, launch, load
from tests.gpu.ptx.memory import Memory

TRIPLE = "nvptx64-nvidia-cuda"
FEATURES = {"sm_80": "+ptx74", "sm_89": "+ptx84", "sm_90a": "+ptx84"}


@functools.cache
def machine(arch: str) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=arch, features=FEATURES[arch], opt=3)


def ptx_of(ir: str, arch: str = "sm_80") -> str:
    """Return the PTX that LLVM generates from LLVM IR, after passes that inline functions and remove unused code."""
    target = machine(arch)
    module = llvm.parse_assembly(ir)
    module.verify()
    module.triple, module.data_layout = TRIPLE, str(target.target_data)
    passes = llvm.create_new_module_pass_manager()
    for name in ("always_inliner", "sroa", "simplify_cfg", "instruction_combine", "global_dead_code_eliminate"):
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))
    return target.emit_assembly(module)


class Card:
    """A software card without a driver: its memory, and a method that launches kernels. The arguments of a launch are integers, such as
    addresses, or NumPy scalars."""

    def __init__(self, num_bytes: int = 1 << 26) -> None:
        self.memory = Memory(num_bytes)

    def load(self, ptx: str) -> LoadedModule:
        return load(ptx, self.memory)

    def upload(self, array: NDArray[Any]) -> int:
        address = self.empty(array.nbytes)
        self.memory.span(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def empty(self, num_bytes: int) -> int:
        address = self.memory.allocate(num_bytes)
        assert address is not None, "the card's memory is full"
        return address

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory.span(address, size).copy().view(dtype).reshape(shape)

    def run(
        self, module: LoadedModule, name: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any, **options: Any
    ) -> None:
        launch(module, name, _three(grid), _three(block), packed(module, name, arguments), **options)


def packed(module: LoadedModule, name: str, arguments: tuple[Any, ...]) -> bytes:
    """Return the bytes of a kernel's parameters for these arguments."""
    parameters = module.module.kernels[name].parameters
    data = bytearray(module.module.kernels[name].parameter_bytes)
    for parameter, value in zip(parameters, arguments, strict=True):
        raw = value.tobytes() if isinstance(value, np.generic) else int(value).to_bytes(parameter.num_bytes, "little", signed=value < 0)
        assert len(raw) == parameter.num_bytes, f"{parameter.name} takes {parameter.num_bytes} bytes"
        data[parameter.offset : parameter.offset + parameter.num_bytes] = raw
    return bytes(data)


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]
    return x, y, z
