"""Emit a scheduled loop nest as LLVM IR.

A kernel has phases: the statements of the body's top-level `Seq`, between which the runtime puts barriers. If the outermost loops of a
phase are parallel, the runtime distributes their iterations over threads; any other phase is a single iteration. Phase K becomes three
functions:

    name.pK        void (ptr buffers, ptr dims, i64 begin, i64 end)               loads the arguments from arrays, calls .run
    name.pK.run    void (ptr noalias b0, ..., i64 n, ..., i64 begin, i64 end)     runs the iterations begin .. end - 1
    name.pK.grid   i64 (ptr dims)                                                 returns the number of iterations

The parameters of `.run` tell LLVM which buffers cannot overlap. `attrs["inplace"]` lists the pairs of buffers, by their numbers, that may
overlap.

A vector loop becomes vector instructions. A value that differs between lanes is a vector with one element per lane; other values are
scalars. A condition that differs between lanes becomes a mask for loads and stores. So the last, partial vector of a row runs exactly the
operations of a full vector, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.kernel import Phase, kernel_of
from compiler.codegen.parameters import Parameters
from compiler.codegen.statements import Statements, constant_extent
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import For, LoopKind, Stmt
from compiler.ir.loops.visit import walk_stmts
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code, vector_literal
from compiler.machine.target import Target


def emit_kernel(name: str, prim: PrimFunc, target: Target) -> KernelCode:
    """Emit a scheduled kernel. The names of its functions begin with `name`. Raise CompileError, which names the kernel, if its schedule is
    for another kind of target."""
    return kernel_of(name, prim, partial(_phase, target))


def _phase(target: Target, symbol: str, parameters: Parameters, stmt: Stmt) -> Phase:
    """Emit phase `stmt` of a kernel as three functions, whose names begin with `symbol`. Raise CompileError if a parallel loop is inside
    another statement while no outermost loop is parallel."""
    loops: list[For] = []
    while isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL and _independent(stmt, loops):
        loops.append(stmt)
        stmt = stmt.body
    if not loops and (inner := _parallel_inside(stmt)) is not None:
        raise CompileError(f"parallel loop {inner.var.name} is inside another statement, so one thread would run it; expected it outermost")
    code = Code()
    statements = _Statements(code, parameters.expressions(code, target), target)
    with code.loop("%begin", "%end") as counter:
        _unravel(statements.indices, Index(counter, code.level), loops)
        statements.run(stmt)
    for ending in code.endings:
        code.do(ending)
    params = f"{parameters.text}{', ' if parameters.text else ''}i64 %begin, i64 %end"
    run = f"define internal void @{symbol}.run({params}) #0 {{\nentry:\n{code.text()}\n  ret void\n}}"
    symbols = PhaseSymbols(symbol, f"{symbol}.grid")
    grid = parameters.grid(symbols.grid, lambda indices: _num_iterations(indices, loops))
    return Phase(symbols, code, "\n".join((run, _entry(symbol, parameters), grid)))


def _independent(loop: For, outer: list[For]) -> bool:
    """Return whether the extent of `loop` contains no variable of the `outer` loops. Only then can one grid cover all these loops."""
    return not any(o.var in loop.extent.vars() for o in outer)


def _parallel_inside(stmt: Stmt) -> For | None:
    """Return a parallel loop inside the statement, or None if there is none."""
    return next((s for s in walk_stmts(stmt) if isinstance(s, For) and s.kind is LoopKind.PARALLEL), None)


def _entry(symbol: str, parameters: Parameters) -> str:
    """Emit the function `symbol`, which the runtime calls for a range of the phase's iterations. It loads the arguments from the arrays
    `buffers` and `dims`, and passes them and the range to the function `symbol`.run, which contains the loops of the phase."""
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
    """Return the product of the extents of the loops. A negative extent counts as 0."""
    total = Index(1)
    for loop in loops:
        total = indices.binary("mul nsw", total, indices.extreme("smax", indices.value(loop.extent), Index(0)))
    return total


def _unravel(indices: Indices, counter: Index, loops: list[For]) -> None:
    """Compute the variables of nested loops from `counter`, which counts the iterations of all loops together."""
    for loop in reversed(loops[1:]):
        extent = indices.value(loop.extent)
        indices.env[loop.var] = indices.binary("urem", counter, extent)
        counter = indices.binary("udiv", counter, extent)
    if loops:
        indices.env[loops[0].var] = counter


class _Statements(Statements):
    """Emits the statements of a phase for a CPU or for WebAssembly. A vector loop becomes vector instructions, and local buffers are on the
    stack."""

    def loop(self, loop: For) -> None:
        """Emit a parallel or a vector loop. Raise CompileError for a loop that is bound to the threads of a GPU."""
        match loop.kind:
            case LoopKind.PARALLEL:  # one thread runs this inner loop serially, because the outer loops are distributed already
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
        """Emit the body of the loop once, with the vector of all lane numbers as the value of the loop's variable, or the scalar 0 if there
        is one lane. Raise CompileError if the loop is inside another vector loop, or if its extent is not a constant."""
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
