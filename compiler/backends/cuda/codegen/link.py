"""Kernels become PTX, and what the host computes for them becomes an object of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from compiler.bytecode.kernel import KernelCode
from compiler.codegen import vector_math
from compiler.codegen.link import link as link_for_host
from compiler.codegen.link import llvm_machine, optimised
from compiler.ir.loops.functions import Fn
from compiler.machine.target import Target, host
from runtime.executable import HostCode


@dataclass(frozen=True, slots=True)
class LinkedCode:
    object: bytes  # PTX
    unoptimised: str  # LLVM IR as emitted
    host: HostCode | None
    target: Target

    def optimised(self) -> str:
        """LLVM IR after the optimiser (`.ll`)."""
        with optimised(self.unoptimised, self.target) as module:
            return str(module)

    def assembly(self) -> str:
        """The object is text (`.s`)."""
        return self.object.decode()


def link(kernels: Iterable[KernelCode], target: Target, shape_functions: str) -> LinkedCode:
    kernels = list(kernels)
    here = host()
    native = link_for_host([], here, "\n\n".join(part for part in (*(k.host for k in kernels), shape_functions) if part))
    text = module_text(kernels, target)
    return LinkedCode(ptx(text, target).encode(), text, HostCode(native.object, here.key), target)


def module_text(kernels: Iterable[KernelCode], target: Target) -> str:
    kernels = list(kernels)
    math = set[tuple[Fn, int]]().union(*(k.math for k in kernels))
    attributes = 'attributes #1 = { alwaysinline nounwind "no-builtins" }\n!0 = !{}'
    return "\n\n".join([*(k.text for k in kernels), *vector_math.definitions(math, target), attributes]) + "\n"


def ptx(text: str, target: Target) -> str:
    with optimised(text, target) as module:
        return llvm_machine(target).emit_assembly(module)
