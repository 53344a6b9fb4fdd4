"""Statements: loops, stores, intrinsic tiles. A schedule turns loops into loops of other kinds, explicit accumulators and tiles."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim, DimVar
from compiler.ir.fields import Holds, holds, node
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.tiles import TileOp


class LoopKind(StrEnum):
    SERIAL = "serial"
    PARALLEL = "parallel"  # iterations are independent: threads claim them
    VECTOR = "vector"  # constant extent: the lanes of one register group
    UNROLL = "unroll"  # constant extent
    BLOCK = "block"  # a GPU's block index
    THREAD = "thread"  # a GPU's thread index


@node
class For:
    """`var` runs over 0 .. extent - 1. A serial loop may carry values through buffers; the other kinds may not."""

    var: DimVar = holds(Holds.NEW_VAR)
    extent: Dim = holds(Holds.DIM)
    body: Stmt = holds(Holds.STMT, scoped=True)
    kind: LoopKind = LoopKind.SERIAL


@node
class Let:
    """An integer becomes a variable that indices can use."""

    var: DimVar = holds(Holds.NEW_VAR)
    value: Scalar = holds(Holds.SCALAR)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Store:
    buffer: Buffer = holds(Holds.BUFFER)
    indices: tuple[Dim, ...] = holds(Holds.DIM)
    value: Scalar = holds(Holds.SCALAR)


@node
class Seq:
    stmts: tuple[Stmt, ...] = holds(Holds.STMT)


@node
class When:
    cond: Scalar = holds(Holds.SCALAR)
    then: Stmt = holds(Holds.STMT)
    orelse: Stmt | None = holds(Holds.STMT, default=None)


@node
class Allocate:
    """A buffer that lives while `body` runs. Global scope: workspace, lifted to a parameter before planning."""

    buffer: Buffer = holds(Holds.NEW_BUFFER)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Tile:
    """One use of an intrinsic. `operands` are places in buffers: the element at which the tile starts."""

    op: TileOp
    operands: tuple[Load, ...] = holds(Holds.PLACE, default=())
    dims: tuple[Dim, ...] = holds(Holds.DIM, default=())


Stmt = For | Let | Store | Seq | When | Allocate | Tile | Attention
