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
    Guard,
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

_AXES = "ijklmnpquvwxyz"


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


def guard(low: DimLike, dim: Dim, high: DimLike, value: Scalar, otherwise: Scalar) -> Guard:
    """`value` where low <= dim < high. `otherwise` is evaluated everywhere, so it must be safe everywhere."""
    return Guard(((Dim.of(low), dim, Dim.of(high)),), value, otherwise)


def pick(index: Dim, values: Sequence[tuple[DimLike, Callable[[Dim], Scalar]]], dtype: DType) -> Scalar:
    """Values side by side: each is `(extent, value)`, and `value` gets the index relative to where it begins."""
    begin, spans = Dim.of(0), list[tuple[Dim, Dim, Scalar]]()
    for extent, value in values:
        spans.append((begin, begin + extent, value(index - begin)))
        begin = begin + extent
    result: Scalar = Const(0, dtype)
    for low, high, value in reversed(spans):
        result = guard(low, index, high, value, result)
    return result


def clamped(value: Scalar, extent: DimLike) -> Scalar:
    """An integer brought into 0 .. extent - 1."""
    wide = cast(value, DType.I64)
    return apply(Fn.MAX, apply(Fn.MIN, wide, index_value(Dim.of(extent) - 1)), Const(0, DType.I64))


def apply(fn: Fn, *args: Scalar) -> Apply:
    return Apply(fn, args)


def seq(*stmts: Stmt) -> Stmt:
    return stmts[0] if len(stmts) == 1 else Seq(stmts)


def accumulator(dtype: DType) -> DType:
    """Small floats are summed in f32."""
    return DType.F32 if dtype in (DType.F16, DType.BF16) else dtype
