"""Emit a kernel, phase by phase. The phases are the statements of the body's sequence, in which nested sequences are flattened; a
body that is no sequence is one phase. A phase reads the results of earlier phases only after these phases have ended on all threads."""

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
    """The code of one phase. `text` is LLVM IR that defines its functions; `symbols` names the functions that the runtime calls."""

    symbols: PhaseSymbols
    code: Code  # the body of the function that runs the statement
    text: str
    host: str = ""  # LLVM IR of the function that returns the size of the grid, if the host runs it but cannot run `text`


def kernel_of(name: str, prim: PrimFunc, phase: Callable[[str, Parameters, Stmt], Phase]) -> KernelCode:
    """Emit a kernel. `phase` emits one statement; the names of its functions begin with the given symbol. If `phase` raises a CompileError,
    raise one that also names the kernel."""
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
