"""The back end of a target, by its architecture."""

from __future__ import annotations

from compiler.backends.base import Backend
from compiler.backends.cpu.backend import CpuBackend
from compiler.backends.cuda.backend import CudaBackend
from compiler.backends.wasm.backend import WasmBackend
from compiler.machine.target import Target, TargetError

BACKENDS: dict[str, Backend] = {
    **dict.fromkeys(("x86_64", "aarch64", "riscv64"), CpuBackend()),
    "nvptx64": CudaBackend(),
    "wasm32": WasmBackend(),
}


def backend_of(target: Target) -> Backend:
    if target.arch not in BACKENDS:
        raise TargetError(f"no back end generates code for {target.arch}; known are {', '.join(BACKENDS)}")
    return BACKENDS[target.arch]
