"""A statement taken apart into loops, temporaries and one store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Allocate, For, LoopKind, Stmt, Store
from compiler.ir.loops.visit import loads
from compiler.ir.prove import prove_le, prove_lt


@dataclass(frozen=True, slots=True)
class PerfectNest:
    """`for axes { buffer[indices] = value }` and nothing else."""

    axes: tuple[tuple[DimVar, Dim], ...]
    store: Store

    @property
    def vars(self) -> tuple[DimVar, ...]:
        return tuple(v for v, _ in self.axes)


def perfect_nest(stmt: Stmt) -> PerfectNest | None:
    axes: list[tuple[DimVar, Dim]] = []
    while isinstance(stmt, For) and stmt.kind is LoopKind.SERIAL:
        axes.append((stmt.var, stmt.extent))
        stmt = stmt.body
    return PerfectNest(tuple(axes), stmt) if isinstance(stmt, Store) else None


def without_allocations(stmt: Stmt) -> tuple[tuple[Buffer, ...], Stmt]:
    """The temporaries around a statement, and the statement."""
    temporaries: list[Buffer] = []
    while isinstance(stmt, Allocate):
        temporaries.append(stmt.buffer)
        stmt = stmt.body
    return tuple(temporaries), stmt


def allocated(buffers: Sequence[Buffer], body: Stmt) -> Stmt:
    """The body with temporaries around it, the first outermost."""
    for buffer in reversed(buffers):
        body = Allocate(buffer, body)
    return body


def in_bounds(scalar: Scalar) -> bool:
    """Whether every load provably stays inside its buffer."""
    return all(
        prove_le(0, index) and prove_lt(index, extent)
        for load in loads(scalar)
        for index, extent in zip(load.indices, load.buffer.shape, strict=True)
    )
