"""Statements: loops, stores, intrinsic tiles."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim, DimVar
from compiler.ir.fields import Holds, holds, node
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.tiles import TileOp


class LoopKind(StrEnum):
    """How the iterations of a loop run. The docstring of `For` says which iterations may depend on each other."""

    SERIAL = "serial"
    PARALLEL = "parallel"  # iterations are independent; threads claim them
    VECTOR = "vector"  # constant extent; the iterations are the lanes of a vector
    UNROLL = "unroll"  # constant extent; the body is written once per iteration
    BLOCK = "block"  # a block of a GPU runs each iteration; a block may run several of them, one after another
    THREAD = "thread"  # constant extent; the variable is the index of the thread, in its GPU block, that runs the iteration


@node
class For:
    """A loop of `var` over 0 .. extent - 1. Iterations of serial and unrolled loops run in order, and may depend on each other through
    buffers. Iterations of other kinds of loops may not, with one exception: the last block of a GPU launch to arrive at the tile
    `block_arrive` may read what the other blocks wrote. Statements after a loop over threads can read what all threads of the block wrote
    in the loop."""

    var: DimVar = holds(Holds.NEW_VAR)
    extent: Dim = holds(Holds.DIM)
    body: Stmt = holds(Holds.STMT, scoped=True)
    kind: LoopKind = LoopKind.SERIAL


@node
class Let:
    """Binds an integer to a variable that indices in `body` can use. The value must lie in the declared range of the variable, since proofs
    rely on the range."""

    var: DimVar = holds(Holds.NEW_VAR)
    value: Scalar = holds(Holds.SCALAR)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Store:
    """Writes a scalar to an element of a buffer."""

    buffer: Buffer = holds(Holds.BUFFER)
    indices: tuple[Dim, ...] = holds(Holds.DIM)
    value: Scalar = holds(Holds.SCALAR)


@node
class Seq:
    """Runs statements in order."""

    stmts: tuple[Stmt, ...] = holds(Holds.STMT)


@node
class When:
    """Runs `then` if the condition holds, else `orelse`, if there is one."""

    cond: Scalar = holds(Holds.SCALAR)
    then: Stmt = holds(Holds.STMT)
    orelse: Stmt | None = holds(Holds.STMT, default=None)


@node
class Allocate:
    """Allocates a buffer while `body` runs. Global buffers are workspace, which a pass lifts to a parameter before memory planning."""

    buffer: Buffer = holds(Holds.NEW_BUFFER)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Tile:
    """A use of an intrinsic. Each operand names the element of a buffer at which the tile starts. `dims` has the integers that are passed
    to the tile at run time."""

    op: TileOp
    operands: tuple[Load, ...] = holds(Holds.PLACE, default=())
    dims: tuple[Dim, ...] = holds(Holds.DIM, default=())


Stmt = For | Let | Store | Seq | When | Allocate | Tile | Attention
