"""Compile kernels to one object file.

Each kernel is compiled by itself, under the name `kernel`, and the objects are merged (relocatable.py). So the code of a kernel depends on
its loop nest and the target alone, and can be kept for other programs (kept.py).

The object is freestanding: it defines every function that it calls. The attribute `no-builtins` keeps LLVM from replacing loops by calls of
memset and memcpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from compiler.bytecode.kernel import KernelCode
from compiler.codegen import vector_math
from compiler.codegen.halves import with_conversions
from compiler.codegen.machine_code import Emit, emitted, llvm_machine, optimised
from compiler.codegen.relocatable import KERNEL, merged
from compiler.ir.loops.functions import Fn
from compiler.machine.target import Target
from runtime.executable import HostCode

ATTRIBUTES: Final = 'attributes #0 = { nounwind "no-builtins" }'


@dataclass(frozen=True, slots=True)
class LinkedCode:
    """Linked machine code, and the LLVM IR from which it was compiled."""

    object: bytes  # an ELF object, a module of WebAssembly, or PTX for a GPU
    unoptimised: str  # LLVM IR before the optimiser; without kernels whose machine code was kept
    target: Target
    host: HostCode | None = None  # the functions that run on the host, if the host cannot run the object
    objects: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # objects by kernel, if each kernel is compiled by itself

    def optimised(self) -> str:
        """Return the LLVM IR after the optimiser (the dump `.ll`). Kernels whose machine code was kept are missing."""
        with optimised(self.unoptimised, self.target) as module:
            return str(module)

    def assembly(self) -> str:
        """Return the assembly (the dump `.s`), or PTX for a GPU. Kernels whose machine code was kept are missing."""
        with optimised(self.unoptimised, self.target) as module:
            return llvm_machine(self.target).emit_assembly(module)


def link(kernels: Iterable[KernelCode], target: Target, extra: str = "", emit: Emit = emitted) -> LinkedCode:
    """Compile all kernels whose machine code is not known yet, and link all kernels. `extra` is LLVM IR of further functions, such as those
    that compute shapes; `emit` compiles it. Without kernels and `extra`, the object defines nothing."""
    kernels = list(kernels)
    objects = {k.name: k.object or emitted(text_of(k, target), target) for k in kernels}
    parts = [*objects.items()]
    if extra or not kernels:
        parts.append(("", emit(module_text([], target, extra), target)))
    return LinkedCode(merged(parts, target.arch), module_text(kernels, target, extra), target, objects=objects)


def text_of(kernel: KernelCode, target: Target) -> str:
    """Return the LLVM IR of one kernel under the name `kernel`, as it is compiled by itself."""
    text = re.sub(rf"@{re.escape(kernel.name)}\.p(?=\d)", f"@{KERNEL}.p", kernel.text)
    return module_text([replace(kernel, text=text)], target)


def module_text(kernels: Iterable[KernelCode], target: Target, extra: str = "", attributes: str = ATTRIBUTES) -> str:
    """Return a module with the kernels, `extra`, and the functions of vector_math.py that the kernels call. `attributes` defines the
    attributes of functions that the text refers to. If the target cannot convert f16, the module has functions for it (halves.py)."""
    kernels = list(kernels)
    math = set[tuple[Fn, int]]().union(*(k.math for k in kernels))
    parts = [*(k.text for k in kernels), extra, *vector_math.definitions(math, target)]
    text = "\n\n".join(p for p in parts if p) + f"\n\n{attributes}\n"
    return text if target.has_f16 else with_conversions(text)
