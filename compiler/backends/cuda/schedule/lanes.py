"""Schedule loops that are written for the vectors of a CPU. A block runs one iteration of the parallel loop, and its threads are the lanes.

One thread runs the statements outside the loops over lanes. Buffers that are allocated around these loops are in shared memory. A condition
or a loop bound around a loop over lanes must be the same for all threads, although statements inside may change the memory that it reads.
So if such a condition or bound reads memory, one thread computes and stores it, and all threads read the result after a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from compiler.ir.dims import ONE, Dim, DimVar
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.scalars import Load, Scalar, dtype_of
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, When
from compiler.ir.loops.visit import loads, map_stmt, rename_buffers, rewrite_dims, sequence, statements, walk_stmts

MOST_BYTES = 40 << 10  # maximum number of bytes of shared memory that a block uses
MOST_LANES = 1024  # maximum number of threads of a block
ZERO = Dim.of(0)


def schedule_lanes(stmt: Stmt) -> Stmt | None:
    """Schedule, in blocks and threads, a parallel loop that contains loops over lanes. Return None for any other statement, if the loop
    contains another parallel loop or a buffer that is not local, and if a block would need too many threads or too much shared memory."""
    if not isinstance(stmt, For) or stmt.kind is not LoopKind.PARALLEL or not _has_lanes(stmt.body):
        return None
    inner = [s for s in walk_stmts(stmt.body) if isinstance(s, For)]
    if any(s.kind is LoopKind.PARALLEL or (s.kind is LoopKind.VECTOR and s.extent.const > MOST_LANES) for s in inner):
        return None
    if any(isinstance(s, Allocate) and s.buffer.scope is not Scope.LOCAL for s in walk_stmts(stmt.body)):
        return None
    block = DimVar("b", 0, stmt.extent - 1)
    lanes = _Lanes()
    body = lanes.block(rewrite_dims(stmt.body, {stmt.var: block.dim}))
    return For(block, stmt.extent, body, LoopKind.BLOCK) if lanes.num_bytes <= MOST_BYTES else None


def _has_lanes(stmt: Stmt) -> bool:
    """Return whether a statement contains a loop over lanes."""
    return any(isinstance(s, For) and s.kind is LoopKind.VECTOR for s in walk_stmts(stmt))


@dataclass(slots=True)
class _Lanes:
    """Converts the body of a parallel loop to the code of a block."""

    num_bytes: int = field(default=0)  # bytes of shared memory that the block needs

    def block(self, stmt: Stmt) -> Stmt:
        """Convert a statement that is not inside a loop over lanes. All threads of a block reach such a statement together. One thread runs
        it if it contains no loop over lanes."""
        if not _has_lanes(stmt):
            return _by_one(stmt)
        match stmt:
            case Seq(stmts=stmts):
                return self._sequence(stmts)
            case For(kind=LoopKind.VECTOR):
                return replace(stmt, body=serial(stmt.body), kind=LoopKind.THREAD)
            case For():
                return replace(stmt, body=self.block(stmt.body), kind=LoopKind.SERIAL)
            case Let(var=var, value=value, body=body):
                return self._read_together(value, lambda same: Let(var, same, self.block(body)))
            case When(cond=cond, then=then, orelse=orelse):
                others = None if orelse is None else self.block(orelse)
                return self._read_together(cond, lambda same: When(same, self.block(then), others))
            case Allocate(buffer=buffer, body=body) if buffer.scope is Scope.LOCAL:
                shared = replace(buffer, scope=Scope.SHARED)
                return self._shared(shared, self.block(rename_buffers(body, {buffer: shared})))
            case _:
                raise AssertionError(stmt)

    def _sequence(self, stmts: Sequence[Stmt]) -> Stmt:
        """Convert a sequence. One thread runs adjacent statements without loops over lanes, so that no barrier separates them."""
        done: list[Stmt] = []
        alone: list[Stmt] = []  # consecutive statements without loops over lanes; one thread runs them
        for stmt in stmts:
            if not _has_lanes(stmt):
                alone.append(stmt)
                continue
            if alone:
                done.append(_by_one(sequence(alone)))
                alone = []
            done.append(self.block(stmt))
        return sequence([*done, _by_one(sequence(alone))] if alone else done)

    def _read_together(self, value: Scalar, then: Callable[[Scalar], Stmt]) -> Stmt:
        """Return the statement that `then` returns for a value. If the value reads memory, one thread computes it, and all threads read the
        result."""
        if next(iter(loads(value)), None) is None:
            return then(value)
        dtype = dtype_of(value)
        cell = Buffer("cell", (ONE,), dtype, Scope.SHARED)
        return self._shared(cell, sequence([_by_one(Store(cell, (ZERO,), value)), *statements(then(Load(cell, (ZERO,))))]))

    def _shared(self, buffer: Buffer, body: Stmt) -> Stmt:
        """Allocate a buffer in shared memory around a statement, and count its bytes."""
        size = buffer.dtype.num_bytes
        for extent in buffer.shape:
            size *= extent.const
        self.num_bytes += -(-size // 16) * 16
        return Allocate(buffer, body)


def _by_one(stmt: Stmt) -> Stmt:
    """Let one thread of a block run a statement, with its loops in order."""
    return For(DimVar("t", 0, ZERO), ONE, serial(stmt), LoopKind.THREAD)


def serial(stmt: Stmt) -> Stmt:
    """Make the parallel and vector loops of a statement serial. This is correct because their iterations are independent."""
    kinds = (LoopKind.PARALLEL, LoopKind.VECTOR)
    return map_stmt(stmt, lambda s: replace(s, kind=LoopKind.SERIAL) if isinstance(s, For) and s.kind in kinds else s)
