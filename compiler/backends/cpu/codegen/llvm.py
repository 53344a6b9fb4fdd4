"""A scheduled loop nest becomes LLVM IR.

A kernel is one function per phase: the statements of the body's top-level `Seq`, between which the runtime puts barriers. A phase
whose outermost loops are parallel hands their iterations out; any other is a single iteration. Each phase is emitted as

    name.pK        void (ptr buffers, ptr dims, i64 begin, i64 end)     unpacks the arguments and calls
    name.pK.run    void (ptr noalias b0, ..., i64 n, ..., i64 begin, i64 end)
    name.pK.grid   i64 (ptr dims)

so that LLVM learns from the parameters which buffers cannot overlap. `attrs["inplace"]`, pairs of buffer numbers, takes the promise back.

A vector loop is written as whole vectors. What differs between its lanes has one operand per lane, all else stays scalar. A condition
that differs between lanes becomes a mask: loads and stores under it are masked, and the tail of a row computes with exactly the
operations of a full vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.expressions import FALSE, TRUE, Expressions, runs
from compiler.codegen.memory import Storage
from compiler.codegen.scalars import Value, memory, register
from compiler.ir.dims import ONE, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.prove import bounds
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code, vector_literal
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target

_F16: Final = re.compile(r"(?<![%@.\w])half(?![.\w])")  # the type, in LLVM's spelling


def emit_kernel(name: str, prim: PrimFunc, target: Target) -> KernelCode:
    kernel = _Kernel(name, prim, target)
    try:
        phases = [kernel.phase(f"{name}.p{i}", stmt) for i, stmt in enumerate(_phases(prim.body))]
    except CompileError as error:
        raise CompileError(f"in kernel {name!r}: {error}") from error
    if not target.halves and any(_F16.search(text) for _, text in phases):
        raise CompileError(f"kernel {name!r} converts f16, for which {target.name} has no instruction; use bf16 or f32")
    return KernelCode(
        name,
        "\n".join(text for _, text in phases),
        tuple(symbols for symbols, _ in phases),
        frozenset(kernel.math),
        len(prim.buffers),
        len(kernel.dims),
        kernel.stack_bytes,
    )


def _phases(body: Stmt) -> tuple[Stmt, ...]:
    if not isinstance(body, Seq):
        return (body,)
    return tuple(phase for stmt in body.stmts for phase in _phases(stmt))


class _Kernel:
    """What the phases of one kernel have in common: the signature."""

    def __init__(self, name: str, prim: PrimFunc, target: Target) -> None:
        self.target = target
        self.buffers = prim.buffers
        self.dims: tuple[DimVar | ScalarParam, ...] = (
            *prim.dim_vars,
            *(p for p in prim.params if isinstance(p, ScalarParam)),
        )
        self.math: set[tuple[Fn, int]] = set()
        self.stack_bytes = 0
        shared = {number for pair in prim.attrs.get("inplace", ()) for number in pair}
        num_inputs = len(self.buffers) - prim.num_outputs
        pointers = [
            f"ptr {'' if i in shared else 'noalias '}{'readonly ' if i < num_inputs else ''}noundef %b{i}" for i in range(len(self.buffers))
        ]
        self.params = ", ".join([*pointers, *(f"i64 {_range(d)}%d{i}" for i, d in enumerate(self.dims))])

    def phase(self, symbol: str, stmt: Stmt) -> tuple[PhaseSymbols, str]:
        loops: list[For] = []
        while isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL and self._independent(stmt, loops):
            loops.append(stmt)
            stmt = stmt.body
        symbols = PhaseSymbols(symbol, f"{symbol}.grid")
        return symbols, "\n".join((self._run(symbol, loops, stmt), self._body(symbol), self._grid(symbols.grid, loops)))

    def _independent(self, loop: For, outer: list[For]) -> bool:
        """Whether `outer` and `loop` make one grid: a box."""
        return not any(o.var in loop.extent.vars() for o in outer)

    def _run(self, symbol: str, loops: list[For], stmt: Stmt) -> str:
        code = Code()
        expressions = Expressions(code, self._scalar_params(code))
        expressions.memory.storage = {b: Storage(f"%b{i}") for i, b in enumerate(self.buffers)}
        expressions.indices.env = self._variables("%d{}")
        statements = _Statements(code, expressions, self.target)
        with code.loop("%begin", "%end") as counter:
            _unravel(expressions.indices, Index(counter, code.level), loops)
            statements.run(stmt)
        for ending in code.endings:
            code.do(ending)
        self.math |= code.math
        self.stack_bytes = max(self.stack_bytes, code.stack_bytes)
        params = f"{self.params}{', ' if self.params else ''}i64 %begin, i64 %end"
        return f"define internal void @{symbol}.run({params}) #0 {{\nentry:\n{code.text()}\n  ret void\n}}"

    def _body(self, symbol: str) -> str:
        """The function that the runtime calls."""
        lines: list[str] = []
        arguments: list[str] = []
        for kind, array, short, count in (("ptr", "buffers", "b", len(self.buffers)), ("i64", "dims", "d", len(self.dims))):
            for i in range(count):
                lines.append(f"  %p{short}{i} = getelementptr {kind}, ptr %{array}, i64 {i}")
                lines.append(f"  %{short}{i} = load {kind}, ptr %p{short}{i}, align 8")
                arguments.append(f"{kind} %{short}{i}")
        arguments += ["i64 %begin", "i64 %end"]
        lines.append(f"  tail call void @{symbol}.run({', '.join(arguments)})")
        head = f"define void @{symbol}(ptr %buffers, ptr %dims, i64 %begin, i64 %end) #0"
        return "\n".join((f"{head} {{", *lines, "  ret void", "}"))

    def _grid(self, symbol: str, loops: list[For]) -> str:
        code = Code()
        indices = Indices(code)
        for i, dim in enumerate(self.dims):
            if isinstance(dim, DimVar):
                pointer = code.hoist(0, f"getelementptr i64, ptr %dims, i64 {i}")
                indices.env[dim] = Index(code.hoist(0, f"load i64, ptr {pointer}, align 8"))
        total = Index(1)
        for loop in loops:
            total = indices.binary("mul nsw", total, indices.extreme("smax", indices.value(loop.extent), Index(0)))
        return f"define i64 @{symbol}(ptr %dims) #0 {{\nentry:\n{code.text()}\n  ret i64 {total.value}\n}}"

    def _variables(self, pattern: str) -> dict[DimVar, Index]:
        return {d: Index(pattern.format(i)) for i, d in enumerate(self.dims) if isinstance(d, DimVar)}

    def _scalar_params(self, code: Code) -> dict[ScalarParam, Value]:
        return {p: Value(_from_word(code, f"%d{i}", p.dtype), p.dtype) for i, p in enumerate(self.dims) if isinstance(p, ScalarParam)}


def _range(dim: DimVar | ScalarParam) -> str:
    if isinstance(dim, ScalarParam):
        return ""
    low, high = bounds(dim)
    return "" if low is None else f"range(i64 {low}, {-(2**63) if high is None else high + 1}) "


def _from_word(code: Code, word: str, dtype: DType) -> str:
    if dtype.is_float:
        return code.hoist(0, f"fptrunc double {code.hoist(0, f'bitcast i64 {word} to double')} to float")
    return word if dtype is DType.I64 else code.hoist(0, f"trunc i64 {word} to {register(dtype)}")


def _unravel(indices: Indices, counter: Index, loops: list[For]) -> None:
    """The variables of a box of loops from the number of the iteration."""
    for loop in reversed(loops[1:]):
        extent = indices.value(loop.extent)
        indices.env[loop.var] = indices.binary("urem", counter, extent)
        counter = indices.binary("udiv", counter, extent)
    if loops:
        indices.env[loops[0].var] = counter


class _Statements:
    def __init__(self, code: Code, expressions: Expressions, target: Target) -> None:
        self.code, self.expressions, self.target = code, expressions, target
        self.indices, self.memory = expressions.indices, expressions.memory

    def run(self, stmt: Stmt) -> None:
        match stmt:
            case Seq(stmts=stmts):
                for s in stmts:
                    self.run(s)
            case For():
                self._loop(stmt)
            case Let(var=var, value=value, body=body):
                bound = self.expressions.scalars.cast(self.expressions.value(value), DType.I64)
                with self.code.scope() as level:
                    self.indices.env[var] = Index(bound.operand, level, bound.lanes)
                    self.run(body)
            case Store(buffer=buffer, indices=indices, value=value):
                result = self.expressions.scalars.cast(self.expressions.value(value), buffer.dtype)
                self.memory.store(buffer, indices, result)
            case When():
                self._when(stmt)
            case Allocate():
                self._allocate(stmt)
            case Tile():
                self._tile(stmt)
            case Attention():
                raise CompileError("attention has no loops yet; schedule it first (pass schedule_kernels)")

    def _loop(self, loop: For) -> None:
        match loop.kind:
            case LoopKind.SERIAL | LoopKind.PARALLEL:  # inside an iteration that was handed out, parallel means serial
                self._serial(loop)
            case LoopKind.UNROLL:
                for i in range(_constant(loop)):
                    self.indices.env[loop.var] = Index(i)
                    self.run(loop.body)
            case LoopKind.VECTOR:
                self._vector(loop)
            case LoopKind.BLOCK | LoopKind.THREAD:
                raise CompileError(
                    f"loop {loop.var.name} is bound to a GPU's {loop.kind}, and the target is a CPU; schedule it for the CPU"
                )

    def _serial(self, loop: For) -> None:
        if loop.extent == ONE:
            self.indices.env[loop.var] = Index(0)
            self.run(loop.body)
            return
        end = self.indices.value(loop.extent)
        if end.lanes > 1:
            raise CompileError(f"loop {loop.var.name} runs for {loop.extent}, which differs between the lanes of a vector loop around it")
        with self.code.loop("0", str(end.value), runs=runs(loop.extent)) as counter:
            self.indices.env[loop.var] = Index(counter, self.code.level)
            self.run(loop.body)

    def _vector(self, loop: For) -> None:
        lanes = _constant(loop)
        if self.memory.lane is not None:
            raise CompileError(f"vector loop {loop.var.name} stands inside vector loop {self.memory.lane.name}; unroll one of them")
        if lanes == 1:
            self.indices.env[loop.var] = Index(0)
            self.run(loop.body)
            return
        self.indices.env[loop.var] = Index(vector_literal("i64", range(lanes)), 0, lanes)
        self.memory.lane, self.memory.num_lanes = loop.var, lanes
        self.run(loop.body)
        self.memory.lane, self.memory.num_lanes = None, 1

    def _when(self, when: When) -> None:
        cond = self.expressions.value(when.cond)
        if cond in (TRUE, FALSE):
            chosen = when.then if cond == TRUE else when.orelse
            if chosen is not None:
                self.run(chosen)
            return
        enter: Callable[[str], AbstractContextManager[None]] = self.code.when if cond.lanes == 1 else self.memory.masked
        with enter(cond.operand):
            self.run(when.then)
        if when.orelse is not None:
            with enter(self.expressions.scalars.apply(Fn.NOT, [cond]).operand):
                self.run(when.orelse)

    def _allocate(self, allocate: Allocate) -> None:
        buffer = allocate.buffer
        if buffer.scope is not Scope.LOCAL:
            raise CompileError(
                f"buffer {buffer.name} is allocated in {buffer.scope} memory; expected local: lift workspace to parameters first"
            )
        size = self.memory.num_lanes
        for extent in buffer.shape:
            if not extent.is_const:
                raise CompileError(f"local buffer {buffer.name} has extent {extent}; expected a constant")
            size *= extent.const
        pointer = self.code.alloca(f"[{size} x {memory(buffer.dtype)}]")
        self.memory.storage[buffer] = Storage(pointer, size, self.memory.lane)
        self.run(allocate.body)

    def _tile(self, tile: Tile) -> None:
        op = tile.op
        if self.memory.lane is not None:
            raise CompileError(f"tile {op.name} stands inside vector loop {self.memory.lane.name}; a tile has lanes of its own")
        if not isinstance(op, Intrinsic) or not op.runs_on(self.target):
            raise CompileError(f"tile {op.name} has no instructions on target {self.target.name}; schedule another one")
        for problem in op.problems():
            raise CompileError(f"tile {op.name}: {problem}")
        places = [self.memory.place(o.buffer, o.indices).pointer for o in tile.operands]
        dims = [self.indices.value(d).value for d in tile.dims]
        op.emit(self.code, places, dims, self.target)


def _constant(loop: For) -> int:
    if not loop.extent.is_const:
        raise CompileError(f"{loop.kind} loop {loop.var.name} runs for {loop.extent}; expected a constant")
    return loop.extent.const
