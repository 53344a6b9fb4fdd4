"""Emit a kernel as one function per phase. A phase is a statement of the body's top-level `Seq`; a phase begins when the one before it has
ended on all threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.parameters import Parameters
from compiler.ir.errors import CompileError
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import statements
from compiler.llvm.ssa import Code


@dataclass(frozen=True, slots=True)
class Phase:
    symbols: PhaseSymbols
    code: Code  # the function that runs the phase
    text: str
    host: str = ""  # LLVM IR of the functions that the host calls, such as those that return grids, if the host cannot run `text`


def kernel_of(name: str, prim: PrimFunc, phase: Callable[[str, Parameters, Stmt], Phase]) -> KernelCode:
    """Emit a kernel. `phase` emits the function of one statement under the given symbol."""
    parameters = Parameters(prim)
    try:
        phases = [phase(f"{name}.p{i}", parameters, stmt) for i, stmt in enumerate(statements(prim.body))]
    except CompileError as error:
        raise CompileError(f"in kernel {name!r}: {error}") from error
    return KernelCode(
        name,
        "\n".join(phase.text for phase in phases),
        tuple(phase.symbols for phase in phases),
        frozenset(fn for phase in phases for fn in phase.code.math),
        len(parameters.buffers),
        len(parameters.dims),
        max((phase.code.stack_bytes for phase in phases), default=0),
        "\n".join(phase.host for phase in phases if phase.host),
    )
