"""Emit statements as LLVM IR, in order.

A back end adds its own kinds of loops and allocates the buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from compiler.codegen.expressions import FALSE, TRUE, Expressions, runs
from compiler.codegen.memory import Storage
from compiler.codegen.scalars import memory
from compiler.ir.dims import ONE
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.llvm.indices import Index
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target


class Statements(ABC):
    """Emits the statements of one function into `code`."""

    def __init__(self, code: Code, expressions: Expressions, target: Target) -> None:
        self.code, self.expressions, self.target = code, expressions, target
        self.indices, self.memory = expressions.indices, expressions.memory

    def run(self, stmt: Stmt) -> None:
        """Emit a statement. Raise CompileError if the target cannot run it or if it is not scheduled."""
        match stmt:
            case Seq(stmts=stmts):
                self.sequence(stmts)
            case For(kind=LoopKind.SERIAL):
                self.serial(stmt)
            case For(kind=LoopKind.UNROLL):
                for i in range(constant_extent(stmt)):
                    self.indices.env[stmt.var] = Index(i)
                    self.run(stmt.body)
            case For():
                self.loop(stmt)
            case Let():
                self._let(stmt)
            case Store():
                self.store(stmt)
            case When():
                self._when(stmt)
            case Allocate():
                self._allocate(stmt)
            case Tile():
                self.tile(stmt)
            case Attention():
                raise CompileError("attention has no loops yet; schedule it first (pass schedule_kernels)")

    @abstractmethod
    def loop(self, loop: For) -> None:
        """Emit a loop that is neither serial nor unrolled, such as a vector loop. Raise CompileError if the back end has no such loops."""

    @abstractmethod
    def allocator(self, buffer: Buffer) -> Callable[[str], str]:
        """Return a function that allocates memory of a given LLVM type for this buffer, and returns its address. Raise CompileError if the
        buffer cannot be allocated at this place."""

    def sequence(self, stmts: Sequence[Stmt]) -> None:
        for stmt in stmts:
            self.run(stmt)

    def serial(self, loop: For) -> None:
        """Emit a serial loop. Raise CompileError if its extent differs between the lanes of a vector loop."""
        if loop.extent == ONE:
            self.indices.env[loop.var] = Index(0)
            self.run(loop.body)
            return
        end = self.indices.value(loop.extent)
        if end.lanes > 1:
            where = "which differs between the lanes of the vector loop around it; expected the same extent in every lane"
            raise CompileError(f"loop {loop.var.name} has extent {loop.extent}, {where}")
        with self.code.loop("0", str(end.value), runs=runs(loop.extent)) as counter:
            self.indices.env[loop.var] = Index(counter, self.code.level)
            self.iteration(loop)

    def iteration(self, loop: For) -> None:
        """Emit the body of a loop whose iterations are counted at run time. A serial loop whose extent is the constant 1 does not call this
        method."""
        self.run(loop.body)

    def store(self, store: Store) -> None:
        result = self.expressions.scalars.cast(self.expressions.value(store.value), store.buffer.dtype)
        self.memory.store(store.buffer, store.indices, result)

    def tile(self, tile: Tile) -> None:
        """Emit a tile. Raise CompileError inside of a vector loop, if the target lacks instructions for the tile, or if its sizes are
        wrong."""
        op = tile.op
        if self.memory.lane is not None:
            raise CompileError(
                f"tile {op.name} is inside vector loop {self.memory.lane.name}; a tile has its own lanes, so use it outside the loop"
            )
        if not isinstance(op, Intrinsic) or not op.runs_on(self.target):
            raise CompileError(
                f"tile {op.name} has no instructions on target {self.target.name}; choose a tile whose features the target has"
            )
        for problem in op.problems():
            raise CompileError(f"tile {op.name}: {problem}")
        places = [self.memory.place(o.buffer, o.indices).pointer for o in tile.operands]
        dims = [self.indices.value(d).value for d in tile.dims]
        op.emit(self.code, places, dims, self.target)

    def _let(self, let: Let) -> None:
        """Emit the value of an integer once, and then the statement that uses it."""
        bound = self.expressions.scalars.cast(self.expressions.value(let.value), DType.I64)
        with self.code.scope() as level:
            self.indices.env[let.var] = Index(bound.operand, level, bound.lanes)
            self.run(let.body)

    def _when(self, when: When) -> None:
        """Emit a branch. If the condition differs between lanes, each side runs only in the lanes that need it, and is skipped if there are
        none. If the condition is a constant, emit only one side."""
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
        """Allocate a buffer, and emit the statement that uses it. In a vector loop, each lane has a copy. Raise CompileError if an extent
        is not constant."""
        buffer, size = allocate.buffer, self.memory.num_lanes
        allocated = self.allocator(buffer)
        for extent in buffer.shape:
            if not extent.is_const:
                raise CompileError(f"{buffer.scope} buffer {buffer.name} has extent {extent}; expected a constant")
            size *= extent.const
        self.memory.storage[buffer] = Storage(allocated(f"[{size} x {memory(buffer.dtype)}]"), size, self.memory.lane)
        self.run(allocate.body)


def constant_extent(loop: For) -> int:
    """Return the extent of a loop. Raise CompileError if it is not a constant."""
    if not loop.extent.is_const:
        raise CompileError(f"{loop.kind} loop {loop.var.name} has extent {loop.extent}; expected a constant")
    return loop.extent.const
