"""The interface of a back end, which turns programs into kernels for one kind of machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode
from compiler.codegen.machine_code import Emit
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline


@dataclass(frozen=True, slots=True)
class Backend:
    """The three functions of a back end that turn a program into scheduled kernels, each kernel into LLVM IR, and all kernels into linked
    code, and two facts about the back end."""

    # Return the pipeline that turns operators into scheduled kernels in planned memory.
    pipeline: Callable[[Target, tuple[Instrument, ...]], Pipeline]
    # Emit one scheduled kernel, under the given name, as LLVM IR.
    emit: Callable[[str, PrimFunc, Target], KernelCode]
    # Link all kernels. The string is LLVM IR of further functions, such as those that compute shapes on the host. The argument of type
    # `Emit` compiles these functions to machine code, and the kernels with them if `keeps_kernels` is false.
    link: Callable[[Iterable[KernelCode], Target, str, Emit], LinkedCode]
    # Whether `link` compiles each kernel by itself, so that its machine code can be kept.
    keeps_kernels: bool
    # Whether the target can prepare weights when they are bound. If not, or if code for the target cannot run where it is compiled, the
    # host prepares them.
    prepares_weights: bool
