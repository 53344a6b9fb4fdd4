"""Perfect nests: statements that consist of loops around a single store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Contraction, GroupedContraction, Scalar
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Stmt, Store
from compiler.ir.loops.visit import free_dims, loads, walk_scalar
from compiler.ir.prove import prove_le, prove_lt


@dataclass(frozen=True, slots=True)
class PerfectNest:
    """The nest `for axes { buffer[indices] = value }`. `lets` has the integers that a product reads from memory between its loops."""

    axes: tuple[tuple[DimVar, Dim], ...]
    store: Store
    lets: tuple[tuple[DimVar, Scalar], ...] = ()

    @property
    def vars(self) -> tuple[DimVar, ...]:
        return tuple(v for v, _ in self.axes)


def perfect_nest(stmt: Stmt) -> PerfectNest | None:
    """Return the nest of serial loops around a single store, or None for any other statement. There may be no loops."""
    axes: list[tuple[DimVar, Dim]] = []
    while isinstance(stmt, For) and stmt.kind is LoopKind.SERIAL:
        axes.append((stmt.var, stmt.extent))
        stmt = stmt.body
    return PerfectNest(tuple(axes), stmt) if isinstance(stmt, Store) else None


def product_nest(stmt: Stmt) -> PerfectNest | None:
    """Return the nest of serial loops around a single store. A product may also read integers between its loops, such as the index of the
    matrix that a row multiplies, if they neither depend on the variable of the innermost loop (the column) nor bound a loop. Return
    None for any other statement."""
    axes: list[tuple[DimVar, Dim]] = []
    lets: list[tuple[DimVar, Scalar]] = []
    while True:
        match stmt:
            case For(var=var, extent=extent, body=body, kind=LoopKind.SERIAL):
                axes.append((var, extent))
                stmt = body
            case Let(var=var, value=value, body=body):
                lets.append((var, value))
                stmt = body
            case _:
                break
    if not isinstance(stmt, Store):
        return None
    nest = PerfectNest(tuple(axes), stmt, tuple(lets))
    return nest if not lets or _reads_matrices(nest) else None


def _reads_matrices(nest: PerfectNest) -> bool:
    """Whether the nest is a product, and the integers that it reads neither depend on the column nor bound a loop."""
    if not nest.axes or not any(isinstance(s, Contraction | GroupedContraction) for s in walk_scalar(nest.store.value)):
        return False
    known, column = {var for var, _ in nest.lets}, nest.vars[-1]
    return not any(column in free_dims(value) for _, value in nest.lets) and not any(known & set(e.vars()) for _, e in nest.axes)


def is_rectangular(axes: Sequence[tuple[DimVar, Dim]]) -> bool:
    """Whether no extent depends on the variable of another loop."""
    variables = {var for var, _ in axes}
    return not any(variables & set(extent.vars()) for _, extent in axes)


def writes_apart(axes: Sequence[tuple[DimVar, Dim]], indices: Sequence[Dim]) -> bool:
    """Whether iterations of these loops that store at `indices` provably store to different elements, because the indices determine the
    variables of all loops."""
    if any(prove_le(extent, 0) for _, extent in axes):
        return True  # nothing is stored
    left = {var: extent for var, extent in axes if extent != Dim.of(1)}
    for index in indices:
        moving = [Dim((term,)) for term in index.terms]
        rest = sum((term for term in moving if left.keys() & set(term.vars())), Dim.of(0))
        rest = rest // rest.factor if rest.factor > 1 else rest
        for number in (rest, -rest):  # flipped elements have a negative index
            while (var := next((v for v, extent in left.items() if number % extent == v.dim), None)) is not None:
                number = number // left.pop(var)
    return not left


def without_allocations(stmt: Stmt) -> tuple[tuple[Buffer, ...], Stmt]:
    """Return the temporaries that are allocated around the innermost statement, the outermost first, and that statement."""
    temporaries: list[Buffer] = []
    while isinstance(stmt, Allocate):
        temporaries.append(stmt.buffer)
        stmt = stmt.body
    return tuple(temporaries), stmt


def allocated(buffers: Sequence[Buffer], body: Stmt) -> Stmt:
    """Wrap the body in allocations, the first buffer outermost."""
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
