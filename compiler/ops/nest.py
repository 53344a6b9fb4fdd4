"""Small helpers that write loop nests and their scalars as one would on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.ir.dims import Dim, DimLike, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Apply,
    Buffer,
    Cast,
    Const,
    DimScalar,
    Fn,
    For,
    Let,
    Load,
    LoopKind,
    Reduce,
    ReduceFn,
    Scalar,
    Seq,
    Stmt,
    Store,
    dtype_of,
)

_AXES = "ijklmnpq"


def axis(name: str, extent: DimLike) -> DimVar:
    """A loop variable that runs over 0 .. extent - 1."""
    return DimVar(name, 0, Dim.of(extent) - 1)


def loops(extents: Sequence[DimLike], body: Callable[..., Stmt], kind: LoopKind = LoopKind.SERIAL) -> Stmt:
    """Nested loops; `body` gets their variables."""
    axes = [axis(_AXES[i], extent) for i, extent in enumerate(extents)]
    stmt = body(*(Dim.of(a) for a in axes))
    for var, extent in zip(reversed(axes), reversed(extents), strict=True):
        stmt = For(var, Dim.of(extent), stmt, kind)
    return stmt


def fill(out: Buffer, value: Callable[..., Scalar]) -> Stmt:
    """`out[i, j, ...] = value(i, j, ...)` for all elements."""
    return loops(out.shape, lambda *ijk: Store(out, ijk, value(*ijk)))


def reduce(fn: ReduceFn, extents: Sequence[DimLike], value: Callable[..., Scalar]) -> Reduce:
    """The fold of `value(r, ...)` over the extents."""
    axes = [axis("r" if i == 0 else f"r{i}", extent) for i, extent in enumerate(extents)]
    return Reduce(fn, tuple((a, Dim.of(e)) for a, e in zip(axes, extents, strict=True)), value(*(Dim.of(a) for a in axes)))


def let(name: str, value: Scalar, body: Callable[[Dim], Stmt], lower: int = 0, upper: DimLike | None = None) -> Stmt:
    """Use an integer that is computed or read as an index."""
    var = DimVar(name, lower, None if upper is None else Dim.of(upper))
    return Let(var, value, body(Dim.of(var)))


def load(buffer: Buffer, *indices: DimLike) -> Load:
    return Load(buffer, tuple(Dim.of(i) for i in indices))


def store(buffer: Buffer, indices: Sequence[DimLike], value: Scalar) -> Store:
    return Store(buffer, tuple(Dim.of(i) for i in indices), value)


def const(value: float | int | bool, dtype: DType) -> Const:
    return Const(value, dtype)


def cast(value: Scalar, dtype: DType) -> Scalar:
    return value if dtype_of(value) is dtype else Cast(value, dtype)


def index_value(dim: DimLike) -> DimScalar:
    return DimScalar(Dim.of(dim))


def apply(fn: Fn, *args: Scalar) -> Apply:
    return Apply(fn, args)


def seq(*stmts: Stmt) -> Stmt:
    return stmts[0] if len(stmts) == 1 else Seq(stmts)


def accumulator(dtype: DType) -> DType:
    """Small floats are summed in f32."""
    return DType.F32 if dtype in (DType.F16, DType.BF16) else dtype
