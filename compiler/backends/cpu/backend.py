"""The CPU back end, in three steps: passes and schedules, LLVM IR, machine code."""

from __future__ import annotations

from collections.abc import Iterable

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.cpu.pipeline import PHASES, pipeline
from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode, link
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline


class CpuBackend:
    phases = PHASES
    prepares_weights = True

    def pipeline(self, target: Target, instruments: tuple[Instrument, ...]) -> Pipeline:
        return pipeline(target, instruments)

    def emit(self, name: str, prim: PrimFunc, target: Target) -> KernelCode:
        return emit_kernel(name, prim, target)

    def link(self, kernels: Iterable[KernelCode], target: Target, shape_functions: str) -> LinkedCode:
        return link(kernels, target, shape_functions)
