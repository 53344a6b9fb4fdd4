"""Compile a module: passes, kernels, link, executable."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.codegen.bytecode import lower
from compiler.codegen.link import link
from compiler.codegen.llvm import emit_kernel
from compiler.ir.module import IRModule
from compiler.passes.base import Instrument
from compiler.passes.pipeline import pipeline
from compiler.target import Target, host
from runtime.executable import Executable, ExecutableMeta


@dataclass(frozen=True, slots=True)
class Options:
    target: Target = field(default_factory=host)
    instruments: tuple[Instrument, ...] = ()


def compile_module(module: IRModule, options: Options | None = None) -> Executable:
    options = options or Options()
    target = options.target
    planned = pipeline(target, options.instruments)(module)
    kernels = {name: emit_kernel(name, prim, target) for name, prim in planned.prim_functions.items()}
    program = lower(planned, kernels, {})
    code = link(kernels.values(), target, "\n\n".join(t for t in program.shape_functions if t))
    meta = ExecutableMeta(target.key, program.functions, tuple(program.kernel_table), tuple(program.regions))
    return Executable(meta, code.object, program.constants)
