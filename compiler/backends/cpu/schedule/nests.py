"""Loops and statements of the schedules that are not yet written in the language of compiler/ir/write.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.ir.dims import Dim, DimLike, DimVar, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Const, DimScalar, Fn, For, Let, Load, LoopKind, Scalar, Stmt, Store, When
from compiler.ir.visit_loops import sequence, statements
from compiler.ir.write import halvings


def loop(name: str, extent: DimLike, body: Callable[[Dim], Stmt], kind: LoopKind = LoopKind.SERIAL) -> For:
    extent = Dim.of(extent)
    var = DimVar(name, 0, extent - 1)
    return For(var, extent, body(Dim.of(var)), kind)


def named(name: str, value: DimLike, upper: DimLike, body: Callable[[Dim], Stmt]) -> Stmt:
    """Compute an index once and give it a name: 0 <= value <= upper must hold."""
    value = Dim.of(value)
    if value.is_const or value.var is not None:
        return body(value)
    var = DimVar(name, 0, Dim.of(upper))
    return Let(var, DimScalar(value), body(Dim.of(var)))


def unravel(p: Dim, axes: Sequence[tuple[str, Dim]], body: Callable[[list[Dim]], Stmt]) -> Stmt:
    """The point of a box, row-major, that the number `p` stands for: the last axis runs fastest."""

    def split(p: Dim, rest: Sequence[tuple[str, Dim]], inner: list[Dim]) -> Stmt:
        if not rest:
            return body(inner)
        (name, extent), outer = rest[-1], rest[:-1]
        extent = dim_max(extent, 1) if extent.is_const else extent  # an empty box has no points, but they must be written down
        if not outer:
            return named(name, p, extent - 1, lambda i: body([i, *inner]))
        return named(name, p % extent, extent - 1, lambda i: split(p // extent, outer, [i, *inner]))

    return split(p, axes, [])


def parallel(name: str, extent: DimLike, body: Callable[[Dim], Stmt]) -> For:
    return loop(name, extent, body, LoopKind.PARALLEL)


def unroll(name: str, extent: int, body: Callable[[Dim], Stmt]) -> For:
    return loop(name, extent, body, LoopKind.UNROLL)


def lanes(extent: int, body: Callable[[Dim], Stmt]) -> For:
    return loop("l", extent, body, LoopKind.VECTOR)


def below(a: DimLike, b: DimLike) -> Scalar:
    return Apply(Fn.LT, (DimScalar(Dim.of(a)), DimScalar(Dim.of(b))))


def when(cond: Scalar, then: Stmt, orelse: Stmt | None = None) -> When:
    return When(cond, then, orelse)


def seq(*stmts: Stmt) -> Stmt:
    return sequence(tuple(s for stmt in stmts for s in statements(stmt)))


def zero(dtype: DType) -> Const:
    return Const(0.0 if dtype.is_float else 0, dtype)


def halves(buffer: Buffer, fn: Fn) -> list[Stmt]:
    """Fold a local array into its first element by halves: its rows, if it has any, then the lanes of the first row. Extents are powers
    of two, so the order depends on nothing else."""
    *rows, width = (extent.const for extent in buffer.shape)

    def into(at: tuple[Dim, ...], other: tuple[Dim, ...]) -> Store:
        return Store(buffer, at, Apply(fn, (Load(buffer, at), Load(buffer, other))))

    steps: list[Stmt] = []
    for half in halvings(rows[0] if rows else 1):
        for row in map(Dim.of, range(half)):
            steps.append(lanes(width, lambda lane, row=row, half=half: into((row, lane), (row + half, lane))))
    first = tuple(Dim.of(0) for _ in rows)
    for half in halvings(width):
        steps.append(lanes(half, lambda lane, half=half: into((*first, lane), (*first, lane + half))))
    return steps
