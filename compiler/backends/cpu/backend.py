"""The CPU back end: it schedules loop nests, emits them as LLVM IR, and links an object file."""

from __future__ import annotations

from typing import Final

from compiler.backends.base import Backend
from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.cpu.pipeline import pipeline
from compiler.codegen.link import link

CPU: Final = Backend(pipeline, emit_kernel, link, keeps_kernels=True, prepares_weights=True)
