"""Schedule a parallel loop whose local arrays have columns, such as a scan: a thread computes one column.

    parallel i {                              for block i, thread c {
      local state[rows, groups * L]             local state[rows]
      for r, unrolled u in groups, lane l in L  for r, unrolled
        state[r, u * L + l] = ...         ->      state[r] = ...
    }                                         }

All threads of a block run the statements outside of the loops over lanes. These statements write nothing but local arrays, so all threads
get the same values. Loops that choose rows of local arrays are unrolled, so that a thread keeps its column in registers. No thread reads or
writes what another one writes, so there are no barriers. The order of operations on a column does not change, so the bits do not change
either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from compiler.backends.cuda.schedule.lanes import MOST_LANES, serial
from compiler.ir.dims import ONE, Dim, DimVar
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.statements import Allocate, For, LoopKind, Stmt, Store, Tile
from compiler.ir.loops.visit import loads, map_scalars, map_stmt, rewrite_dims, substatements, walk_stmts
from compiler.ir.prove import prove_divisible

MOST_KEPT = 160  # maximum number of elements of local arrays that a thread keeps in registers
ZERO = Dim.of(0)


def schedule_columns(stmt: Stmt) -> Stmt | None:
    """Schedule a parallel loop whose local arrays have columns. Return None for any other statement: if no loop around a loop over lanes
    chooses its group of columns, if groups have different sizes, if statements outside of loops over lanes write other memory than local
    arrays, or if a thread would need the column of another thread. Also return None if a block would have too many threads, or a thread too
    many elements."""
    if not isinstance(stmt, For) or stmt.kind is not LoopKind.PARALLEL:
        return None
    vectors = list(_vectors(stmt.body, ()))
    groups = [group for vector in vectors if (group := _group(vector)) is not None]
    if len(groups) < len(vectors) or not _writes_columns(stmt.body, frozenset(groups)):
        return None
    if any(sum(loop in groups for loop in vector.around) > 1 for vector in vectors):
        return None  # a thread would run the inner group once, not once for each outer group
    sizes = {(group.extent.const, vector.loop.extent.const) for group, vector in zip(groups, vectors, strict=True)}
    if len(sizes) != 1:
        return None
    ((count, lanes),) = sizes
    width = count * lanes
    if not 0 < width <= MOST_LANES:
        return None
    column, block = DimVar("c", 0, Dim.of(width - 1)), DimVar("b", 0, stmt.extent - 1)
    number = column.dim // lanes  # number of the group
    lane = column.dim - number * lanes
    dims = {stmt.var: block.dim, **{group.var: number for group in groups}, **{vector.loop.var: lane for vector in vectors}}
    body = map_stmt(stmt.body, lambda s: s.body if isinstance(s, For) and s.var in dims else s)
    body = rewrite_dims(body, dims)
    if not _are_apart(body, column.dim, width):
        return None
    private = {s.buffer for vector in vectors for s in walk_stmts(vector.loop) if isinstance(s, Store) and s.buffer.scope is Scope.LOCAL}
    if any(indices[-1:] != (column.dim,) for buffer, indices in _accesses(body) if buffer in private):
        return None
    body = _unrolled(_without_columns(body, private))
    arrays = {buffer for buffer, _ in _accesses(body) if buffer.scope is Scope.LOCAL}
    kept = sum(prod(extent.const for extent in buffer.shape) for buffer in arrays)
    return For(block, stmt.extent, For(column, Dim.of(width), serial(body), LoopKind.THREAD), LoopKind.BLOCK) if kept <= MOST_KEPT else None


@dataclass(frozen=True, slots=True)
class _Vector:
    """A loop over lanes, and the loops around it."""

    loop: For
    around: tuple[For, ...]


def _vectors(stmt: Stmt, around: tuple[For, ...]) -> Iterator[_Vector]:
    """Yield the loops over lanes in a statement that is inside the loops `around`."""
    if isinstance(stmt, For):
        if stmt.kind is LoopKind.VECTOR:
            yield _Vector(stmt, around)
            return
        around = (*around, stmt)
    for inner in substatements(stmt):
        yield from _vectors(inner, around)


def _group(vector: _Vector) -> For | None:
    """Return the loop, of constant extent, that chooses which group of columns a loop over lanes accesses: the last indices of local arrays
    are the group's first column plus the lane. Return None if there is no such loop."""
    loop = vector.loop
    last = [at[-1] for buffer, at in _accesses(loop) if buffer.scope is Scope.LOCAL and at and loop.var in at[-1].vars()]
    around = [outer for outer in vector.around if outer.extent.is_const] if last else []
    return next((outer for outer in around if all(d == outer.var.dim * loop.extent + loop.var.dim for d in last)), None)


def _accesses(stmt: Stmt) -> Iterator[tuple[Buffer, tuple[Dim, ...]]]:
    """Yield the buffer and the indices of each load and store."""
    for load in loads(stmt):
        yield load.buffer, load.indices
    for s in walk_stmts(stmt):
        if isinstance(s, Store):
            yield s.buffer, s.indices


def _writes_columns(stmt: Stmt, groups: frozenset[For], *, is_inside: bool = False) -> bool:
    """Return whether all threads may run the parts of a statement that are outside of loops over lanes. These parts may write only local
    arrays. Inside a loop of `groups` (`is_inside`) they may not even write local arrays, because a thread runs the body of such a loop
    once."""
    match stmt:
        case For(kind=LoopKind.VECTOR):
            return True
        case Store(buffer=buffer):
            return buffer.scope is Scope.LOCAL and not is_inside
        case Tile(op=op) if any(operand.written for operand in op.operands):
            return False
        case _:
            is_inside = is_inside or stmt in groups
            return all(_writes_columns(inner, groups, is_inside=is_inside) for inner in substatements(stmt))


def _are_apart(body: Stmt, column: Dim, width: int) -> bool:
    """Return whether threads are independent outside of local arrays: no thread reads or writes an element that another thread writes. For
    this, each access to a buffer that is written must be in the thread's own column."""
    stores = [s for s in walk_stmts(body) if isinstance(s, Store) and s.buffer.scope is not Scope.LOCAL]
    written = {s.buffer for s in stores}
    own = (x.indices for x in (*stores, *loads(body)) if x.buffer in written)
    return all(at and prove_divisible(at[-1] - column, width) for at in own)


def _without_columns(stmt: Stmt, private: set[Buffer]) -> Stmt:
    """Drop the last dimension of the arrays `private`, of which a thread accesses only its column, and the last index of each access."""
    narrow = {buffer: replace(buffer, shape=buffer.shape[:-1] or (ONE,)) for buffer in private}

    def of_scalar(scalar: Scalar) -> Scalar:
        if isinstance(scalar, Load) and scalar.buffer in narrow:
            return Load(narrow[scalar.buffer], scalar.indices[:-1] or (ZERO,))
        return scalar

    def of_stmt(s: Stmt) -> Stmt:
        """Drop the column from a store to, or an allocation of, a narrowed array."""
        match s:
            case Store(buffer=buffer, indices=indices) if buffer in narrow:
                return replace(s, buffer=narrow[buffer], indices=indices[:-1] or (ZERO,))
            case Allocate(buffer=buffer) if buffer in narrow:
                return replace(s, buffer=narrow[buffer])
            case _:
                return s

    return map_stmt(map_scalars(stmt, of_scalar), of_stmt)


def _unrolled(stmt: Stmt) -> Stmt:
    """Unroll loops of constant extent that choose elements of local arrays."""
    chosen = {var for buffer, indices in _accesses(stmt) if buffer.scope is Scope.LOCAL for d in indices for var in d.vars()}
    return map_stmt(stmt, lambda s: replace(s, kind=LoopKind.UNROLL) if isinstance(s, For) and s.var in chosen and s.extent.is_const else s)
