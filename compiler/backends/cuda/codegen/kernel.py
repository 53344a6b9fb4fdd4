"""A loop nest of blocks and threads becomes LLVM IR for a GPU.

A kernel is one function per phase: the statements of the body's top-level `Seq`, each of them a launch. A phase is emitted as

    name$pK         void (ptr record)                        on the GPU: unpacks the record and calls
    name$pK$run     void (ptr noalias b0, ..., i64 n, ...)
    name.pK.grid    i64 (ptr dims)                           on the host: how many blocks a launch has

A record is an array of 64-bit words: where the first thread writes the record's own address when it begins, the addresses of the buffers,
then the integers. `dims` are its integers.

A block takes the iterations of a block loop that have its number, and those that lie a grid behind: any grid computes the same. The
iterations of a thread loop run side by side; a barrier stands behind a thread loop that something in its block follows.
"""

from __future__ import annotations

import re

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.expressions import FALSE, TRUE, Expressions, runs
from compiler.codegen.memory import Storage
from compiler.codegen.scalars import Value, memory, register
from compiler.ir.dims import ONE, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import statements, walk_stmts
from compiler.ir.prove import bounds
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target

GLOBAL, SHARED = "ptr addrspace(1)", "ptr addrspace(3)"
_BEGUN = f"""entry:
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %either = or i32 %thread, %block
  %first = icmp eq i32 %either, 0
  br i1 %first, label %begin, label %work
begin:
  %begun = load {GLOBAL}, {GLOBAL} %record, align 8
  store volatile {GLOBAL} %record, {GLOBAL} %begun, align 8
  br label %work
work:""".splitlines()


def emit_kernel(name: str, prim: PrimFunc, target: Target) -> KernelCode:
    kernel = _Kernel(prim, target)
    try:
        phases = [kernel.phase(f"{name}.p{i}", stmt) for i, stmt in enumerate(statements(prim.body))]
    except CompileError as error:
        raise CompileError(f"in kernel {name!r}: {error}") from error
    return KernelCode(
        name,
        "\n".join(text for _, text, _ in phases),
        tuple(symbols for symbols, _, _ in phases),
        frozenset(kernel.math),
        len(prim.buffers),
        len(kernel.dims),
        kernel.stack_bytes,
        "\n".join(grid for _, _, grid in phases),
    )


def ptx_name(symbol: str) -> str:
    """PTX has no dots in names."""
    return re.sub(r"\W", "$", symbol)


class _Kernel:
    """What the phases of one kernel have in common: the record."""

    def __init__(self, prim: PrimFunc, target: Target) -> None:
        self.target = target
        self.buffers = prim.buffers
        self.dims: tuple[DimVar | ScalarParam, ...] = (*prim.dim_vars, *(p for p in prim.params if isinstance(p, ScalarParam)))
        self.math: set[tuple[Fn, int]] = set()
        self.stack_bytes = 0
        shared = {number for pair in prim.attrs.get("inplace", ()) for number in pair}
        num_inputs = len(self.buffers) - prim.num_outputs
        pointers = [
            f"ptr {'' if i in shared else 'noalias '}{'readonly ' if i < num_inputs else ''}noundef %b{i}" for i in range(len(self.buffers))
        ]
        self.params = ", ".join([*pointers, *(f"i64 {_range(d)}%d{i}" for i, d in enumerate(self.dims))])

    def phase(self, symbol: str, stmt: Stmt) -> tuple[PhaseSymbols, str, str]:
        """The symbols of a phase, its code for the GPU, and that for the host."""
        name, threads = ptx_name(symbol), _num_threads(stmt)
        symbols = PhaseSymbols(name, f"{symbol}.grid", threads)
        return symbols, "\n".join((*self._run(name, stmt), self._entry(name, threads))), self._grid(symbols.grid, stmt)

    def _run(self, name: str, stmt: Stmt) -> tuple[str, ...]:
        code = Code()
        expressions = Expressions(code, self._scalar_params(code))
        expressions.memory.storage = {b: Storage(f"%b{i}") for i, b in enumerate(self.buffers)}
        expressions.indices.env = {d: Index(f"%d{i}") for i, d in enumerate(self.dims) if isinstance(d, DimVar)}
        phase = _Statements(code, expressions, self.target, name)
        phase.run(stmt)
        self.math |= code.math
        self.stack_bytes = max(self.stack_bytes, code.stack_bytes)
        head = f"define internal void @{name}$run({self.params}) #1 {{\nentry:"
        return (*phase.shared, f"{head}\n{code.text()}\n  ret void\n}}")

    def _entry(self, name: str, threads: int) -> str:
        """The function that is launched."""
        lines: list[str] = []
        arguments: list[str] = []
        for i in range(len(self.buffers) + len(self.dims)):
            kind = GLOBAL if i < len(self.buffers) else "i64"
            lines.append(f"  %p{i} = getelementptr i64, {GLOBAL} %record, i64 {i + 1}")
            lines.append(f"  %w{i} = load {kind}, {GLOBAL} %p{i}, align 8, !invariant.load !0")
            if kind == GLOBAL:
                lines.append(f"  %g{i} = addrspacecast {GLOBAL} %w{i} to ptr")
            arguments.append(f"ptr %g{i}" if kind == GLOBAL else f"i64 %w{i}")
        lines.append(f"  call void @{name}$run({', '.join(arguments)})")
        head = f'define ptx_kernel void @{name}({GLOBAL} noundef %record) nounwind "nvvm.reqntid"="{threads}"'
        return "\n".join((f"{head} {{", *_BEGUN, *lines, "  ret void", "}"))

    def _grid(self, symbol: str, stmt: Stmt) -> str:
        """The extent of the outermost block loop."""
        code = Code()
        indices = Indices(code)
        for i, dim in enumerate(self.dims):
            if isinstance(dim, DimVar):
                pointer = code.hoist(0, f"getelementptr i64, ptr %dims, i64 {i}")
                indices.env[dim] = Index(code.hoist(0, f"load i64, ptr {pointer}, align 8"))
        if not isinstance(stmt, For) or stmt.kind is not LoopKind.BLOCK:
            raise CompileError("a phase is no loop over blocks; schedule it first (pass schedule_kernels)")
        blocks = indices.value(stmt.extent)
        return f"define i64 @{symbol}(ptr %dims) #0 {{\nentry:\n{code.text()}\n  ret i64 {blocks.value}\n}}"

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


def _thread_loops(stmt: Stmt) -> list[For]:
    return [s for s in walk_stmts(stmt) if isinstance(s, For) and s.kind is LoopKind.THREAD]


def _num_threads(stmt: Stmt) -> int:
    """Of a block: as many as its longest thread loop has iterations."""
    return max((_constant(loop) for loop in _thread_loops(stmt)), default=1)


class _Statements:
    """Where the code stands: the block loops around are run by all threads of a block together, what is in a thread loop by each."""

    def __init__(self, code: Code, expressions: Expressions, target: Target, name: str) -> None:
        self.code, self.expressions, self.target = code, expressions, target
        self.indices, self.memory = expressions.indices, expressions.memory
        self.shared: list[str] = []  # definitions of arrays in shared memory
        self.in_thread = False
        self._name = name

    def run(self, stmt: Stmt) -> None:
        match stmt:
            case Seq(stmts=stmts):
                for i, s in enumerate(stmts):
                    self.run(s)
                    if not self.in_thread and i + 1 < len(stmts) and _thread_loops(s):
                        self.code.do("call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")
            case For():
                self._loop(stmt)
            case Let(var=var, value=value, body=body):
                bound = self.expressions.scalars.cast(self.expressions.value(value), DType.I64)
                with self.code.scope() as level:
                    self.indices.env[var] = Index(bound.operand, level)
                    self.run(body)
            case Store(buffer=buffer, indices=indices, value=value):
                if not self.in_thread:
                    raise CompileError(f"buffer {buffer.name} is written outside of a thread loop; give the block one")
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
            case LoopKind.BLOCK:
                end = str(self.indices.value(loop.extent).value)
                with self.code.loop(self._special("ctaid"), end, step=self._special("nctaid")) as counter:
                    self.indices.env[loop.var] = Index(counter, self.code.level)
                    self.run(loop.body)
                    if len(_thread_loops(loop.body)) > 1:  # the next iteration writes what this one may still read
                        self.code.do("call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")
            case LoopKind.THREAD:
                self._threads(loop)
            case LoopKind.SERIAL:
                self._serial(loop)
            case LoopKind.UNROLL:
                for i in range(_constant(loop)):
                    self.indices.env[loop.var] = Index(i)
                    self.run(loop.body)
            case LoopKind.PARALLEL | LoopKind.VECTOR:
                raise CompileError(f"{loop.kind} loop {loop.var.name} is for a CPU; schedule it in blocks and threads")

    def _threads(self, loop: For) -> None:
        if self.in_thread:
            raise CompileError(f"thread loop {loop.var.name} stands inside another one")
        thread = self._special("tid")
        self.indices.env[loop.var] = Index(thread)
        self.in_thread = True
        with self.code.when(self.code.op(f"icmp slt i64 {thread}, {_constant(loop)}")):
            self.run(loop.body)
        self.in_thread = False

    def _special(self, register: str) -> str:
        return self.code.hoist(0, f"zext i32 {self.code.hoist(0, f'call i32 @llvm.nvvm.read.ptx.sreg.{register}.x()')} to i64")

    def _serial(self, loop: For) -> None:
        if loop.extent == ONE:
            self.indices.env[loop.var] = Index(0)
            self.run(loop.body)
            return
        with self.code.loop("0", str(self.indices.value(loop.extent).value), runs=runs(loop.extent)) as counter:
            self.indices.env[loop.var] = Index(counter, self.code.level)
            self.run(loop.body)

    def _when(self, when: When) -> None:
        cond = self.expressions.value(when.cond)
        if cond in (TRUE, FALSE):
            chosen = when.then if cond == TRUE else when.orelse
            if chosen is not None:
                self.run(chosen)
            return
        with self.code.when(cond.operand):
            self.run(when.then)
        if when.orelse is not None:
            with self.code.when(self.expressions.scalars.apply(Fn.NOT, [cond]).operand):
                self.run(when.orelse)

    def _allocate(self, allocate: Allocate) -> None:
        buffer = allocate.buffer
        size = 1
        for extent in buffer.shape:
            if not extent.is_const:
                raise CompileError(f"{buffer.scope} buffer {buffer.name} has extent {extent}; expected a constant")
            size *= extent.const
        self.memory.storage[buffer] = Storage(self._array(buffer, f"[{size} x {memory(buffer.dtype)}]"), size)
        self.run(allocate.body)

    def _array(self, buffer: Buffer, type_: str) -> str:
        match buffer.scope:
            case Scope.LOCAL if self.in_thread:
                return self.code.alloca(type_)
            case Scope.SHARED if not self.in_thread:
                name = f"@{self._name}$shared{len(self.shared)}"
                self.shared.append(f"{name} = internal addrspace(3) global {type_} poison, align 16")
                return self.code.hoist(0, f"addrspacecast {SHARED} {name} to ptr")
            case scope:
                wanted = "local memory inside of a thread loop, shared memory outside"
                raise CompileError(f"buffer {buffer.name} is allocated in {scope} memory; expected {wanted}")

    def _tile(self, tile: Tile) -> None:
        op = tile.op
        if not isinstance(op, Intrinsic) or not op.runs_on(self.target):
            raise CompileError(f"tile {op.name} has no instructions on target {self.target.name}; schedule another one")
        for problem in op.problems():
            raise CompileError(f"tile {op.name}: {problem}")
        places = [self.memory.place(o.buffer, o.indices).pointer for o in tile.operands]
        op.emit(self.code, places, [self.indices.value(d).value for d in tile.dims], self.target)


def _constant(loop: For) -> int:
    if not loop.extent.is_const:
        raise CompileError(f"{loop.kind} loop {loop.var.name} runs for {loop.extent}; expected a constant")
    return loop.extent.const
