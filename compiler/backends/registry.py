"""Find the back end of a target by its architecture."""

from __future__ import annotations

from compiler.backends.base import Backend
from compiler.backends.cpu.backend import CPU
from compiler.backends.cuda.backend import CUDA
from compiler.backends.wasm.backend import WASM
from compiler.machine.target import Target, TargetError

BACKENDS: dict[str, Backend] = {
    **dict.fromkeys(("x86_64", "aarch64", "riscv64"), CPU),
    "nvptx64": CUDA,
    "wasm32": WASM,
}


def backend_of(target: Target) -> Backend:
    """Return the back end of a target. Raise TargetError if none generates code for its architecture."""
    if target.arch not in BACKENDS:
        raise TargetError(f"no back end generates code for {target.arch}; known are {', '.join(BACKENDS)}")
    return BACKENDS[target.arch]
