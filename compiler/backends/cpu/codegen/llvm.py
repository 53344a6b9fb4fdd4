"""Emit a scheduled loop nest as LLVM IR.

A kernel is one function per phase. Phases are the statements of the body's top-level `Seq`; the runtime puts barriers between them. If the
outermost loops of a phase are parallel, the runtime distributes their iterations; any other phase is a single iteration. Each phase is
emitted as

    name.pK        void (ptr buffers, ptr dims, i64 begin, i64 end)     unpacks the arguments and calls
    name.pK.run    void (ptr noalias b0, ..., i64 n, ..., i64 begin, i64 end)
    name.pK.grid   i64 (ptr dims)

so that the parameters tell LLVM which buffers cannot overlap. `attrs["inplace"]`, pairs of buffer numbers, names buffers that may overlap.

A vector loop is written as whole vectors. A value that differs between lanes is a vector with one element per lane; all others stay scalar.
A condition that differs between lanes becomes a mask: loads and stores under it are masked, and the tail of a row computes with exactly the
operations of a full vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.kernel import Phase, kernel_of
from compiler.codegen.parameters import Parameters
from compiler.codegen.statements import Statements, constant_extent
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import For, LoopKind, Stmt
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code, vector_literal
from compiler.machine.target import Target

_F16: Final = re.compile(r"(?<![%@.\w])half(?![.\w])")  # the type f16, in LLVM's spelling


def emit_kernel(name: str, prim: PrimFunc, target: Target) -> KernelCode:
    kernel = kernel_of(name, prim, partial(_phase, target))
    if not target.halves and _F16.search(kernel.text):
        raise CompileError(f"kernel {name!r} converts f16, for which {target.name} has no instruction; use bf16 or f32")
    return kernel


def _phase(target: Target, symbol: str, parameters: Parameters, stmt: Stmt) -> Phase:
    loops: list[For] = []
    while isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL and _independent(stmt, loops):
        loops.append(stmt)
        stmt = stmt.body
    code = Code()
    statements = _Statements(code, parameters.expressions(code), target)
    with code.loop("%begin", "%end") as counter:
        _unravel(statements.indices, Index(counter, code.level), loops)
        statements.run(stmt)
    for ending in code.endings:
        code.do(ending)
    params = f"{parameters.text}{', ' if parameters.text else ''}i64 %begin, i64 %end"
    run = f"define internal void @{symbol}.run({params}) #0 {{\nentry:\n{code.text()}\n  ret void\n}}"
    symbols = PhaseSymbols(symbol, f"{symbol}.grid")
    grid = parameters.grid(symbols.grid, lambda indices: _num_iterations(indices, loops))
    return Phase(symbols, code, "\n".join((run, _body(symbol, parameters), grid)))


def _independent(loop: For, outer: list[For]) -> bool:
    """Return whether the extent of `loop` depends on no loop of `outer`, so that they form one grid."""
    return not any(o.var in loop.extent.vars() for o in outer)


def _body(symbol: str, parameters: Parameters) -> str:
    """Emit the function that the runtime calls."""
    lines: list[str] = []
    arguments: list[str] = []
    for kind, array, short, count in (("ptr", "buffers", "b", len(parameters.buffers)), ("i64", "dims", "d", len(parameters.dims))):
        for i in range(count):
            lines.append(f"  %p{short}{i} = getelementptr {kind}, ptr %{array}, i64 {i}")
            lines.append(f"  %{short}{i} = load {kind}, ptr %p{short}{i}, align 8")
            arguments.append(f"{kind} %{short}{i}")
    arguments += ["i64 %begin", "i64 %end"]
    lines.append(f"  tail call void @{symbol}.run({', '.join(arguments)})")
    head = f"define void @{symbol}(ptr %buffers, ptr %dims, i64 %begin, i64 %end) #0"
    return "\n".join((f"{head} {{", *lines, "  ret void", "}"))


def _num_iterations(indices: Indices, loops: list[For]) -> Index:
    total = Index(1)
    for loop in loops:
        total = indices.binary("mul nsw", total, indices.extreme("smax", indices.value(loop.extent), Index(0)))
    return total


def _unravel(indices: Indices, counter: Index, loops: list[For]) -> None:
    """Compute the variables of nested loops from the index of an iteration of their grid."""
    for loop in reversed(loops[1:]):
        extent = indices.value(loop.extent)
        indices.env[loop.var] = indices.binary("urem", counter, extent)
        counter = indices.binary("udiv", counter, extent)
    if loops:
        indices.env[loops[0].var] = counter


class _Statements(Statements):
    def loop(self, loop: For) -> None:
        match loop.kind:
            case LoopKind.PARALLEL:  # a parallel loop inside a distributed iteration runs serially
                self.serial(loop)
            case LoopKind.VECTOR:
                self._vector(loop)
            case kind:
                raise CompileError(f"loop {loop.var.name} is bound to a GPU's {kind}, but the target is a CPU; schedule it for the CPU")

    def allocator(self, buffer: Buffer) -> Callable[[str], str]:
        if buffer.scope is not Scope.LOCAL:
            raise CompileError(
                f"buffer {buffer.name} is allocated in {buffer.scope} memory; expected local: lift workspace to parameters first"
            )
        return self.code.alloca

    def _vector(self, loop: For) -> None:
        lanes = constant_extent(loop)
        if self.memory.lane is not None:
            raise CompileError(f"vector loop {loop.var.name} is inside vector loop {self.memory.lane.name}; unroll one of them")
        if lanes == 1:
            self.indices.env[loop.var] = Index(0)
            self.run(loop.body)
            return
        self.indices.env[loop.var] = Index(vector_literal("i64", range(lanes)), 0, lanes)
        self.memory.lane, self.memory.num_lanes = loop.var, lanes
        self.run(loop.body)
        self.memory.lane, self.memory.num_lanes = None, 1
