"""What a back end is: how programs become kernels of one kind of machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline


@dataclass(frozen=True, slots=True)
class Backend:
    """The three steps to machine code."""

    # The passes from operators to scheduled kernels in planned memory.
    pipeline: Callable[[Target, tuple[Instrument, ...]], Pipeline]
    # One scheduled kernel, under its name, as LLVM IR.
    emit: Callable[[str, PrimFunc, Target], KernelCode]
    # One object of all kernels, and of the text of the functions that compute shapes on the host.
    link: Callable[[Iterable[KernelCode], Target, str], LinkedCode]
    # Whether its kernels prepare weights when these are bound. Otherwise the host does.
    prepares_weights: bool
