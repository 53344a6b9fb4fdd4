"""The CUDA back end, in three steps: passes and schedules, LLVM IR, PTX."""

from __future__ import annotations

from collections.abc import Iterable

from compiler.backends.cuda.codegen.kernel import emit_kernel
from compiler.backends.cuda.codegen.link import LinkedCode, link
from compiler.backends.cuda.pipeline import PHASES, pipeline
from compiler.bytecode.kernel import KernelCode
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline


class CudaBackend:
    phases = PHASES
    prepares_weights = False

    def pipeline(self, target: Target, instruments: tuple[Instrument, ...]) -> Pipeline:
        return pipeline(target, instruments)

    def emit(self, name: str, prim: PrimFunc, target: Target) -> KernelCode:
        return emit_kernel(name, prim, target)

    def link(self, kernels: Iterable[KernelCode], target: Target, shape_functions: str) -> LinkedCode:
        return link(kernels, target, shape_functions)
