"""Compile kernels to PTX for the GPU. Compile the functions that return sizes of grids and shapes to an object for the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode, module_text
from compiler.codegen.link import link as link_for_host
from compiler.codegen.machine_code import Emit, emitted
from compiler.machine.target import Target, host
from runtime.executable import HostCode

ATTRIBUTES: Final = 'attributes #1 = { alwaysinline nounwind "no-builtins" }\n!0 = !{}'


def link(kernels: Iterable[KernelCode], target: Target, extra: str = "", emit: Emit = emitted) -> LinkedCode:
    """Compile all kernels to PTX, and the functions that run on the host to an object for this machine. `extra` is LLVM IR of further host
    functions, such as those that compute shapes."""
    kernels, here = list(kernels), host()
    native = link_for_host([], here, "\n\n".join(part for part in (*(k.host for k in kernels), extra) if part), emit)
    text = module_text(kernels, target, attributes=ATTRIBUTES)
    return LinkedCode(emit(text, target), text, target, HostCode(native.object, here.key))
