"""Loops and statements as product schedules nest them: bodies are functions of the loop variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.ir.dims import Dim, DimLike, DimVar, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.scalars import Apply, Const, DimScalar, Scalar
from compiler.ir.loops.statements import For, Let, LoopKind, Stmt, When
from compiler.ir.loops.visit import sequence, statements


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


def local(name: str, *shape: int, dtype: DType = DType.F32) -> Buffer:
    """A buffer in a thread's own memory."""
    return Buffer(name, tuple(Dim.of(n) for n in shape), dtype, Scope.LOCAL)
