"""The CUDA back end: it schedules loop nests, emits them as LLVM IR, and compiles this to PTX."""

from __future__ import annotations

from typing import Final

from compiler.backends.base import Backend
from compiler.backends.cuda.codegen.kernel import emit_kernel
from compiler.backends.cuda.codegen.link import link
from compiler.backends.cuda.pipeline import pipeline

CUDA: Final = Backend(pipeline, emit_kernel, link, keeps_kernels=False, prepares_weights=False)
