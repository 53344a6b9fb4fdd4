"""The WebAssembly back end. Since browsers compile WebAssembly for a CPU, kernels get the passes, the schedules and the LLVM IR of the CPU
back end."""

from __future__ import annotations

from typing import Final

from compiler.backends.base import Backend
from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.cpu.pipeline import pipeline
from compiler.backends.wasm.codegen.link import link

WASM: Final = Backend(pipeline, emit_kernel, link, keeps_kernels=False, prepares_weights=False)
