"""Small expressions, and the local buffer, that schedules write in many places."""

from __future__ import annotations

from compiler.backends.cpu.schedule.nests import lanes
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, DimScalar, Fn, Load, Scalar, Scope, Stmt, Store
from compiler.ir.write import halvings

F32 = DType.F32


def plus(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.ADD, (a, b))


def local(name: str, *shape: int, dtype: DType = F32) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), dtype, Scope.LOCAL)


def f32(scalar: Load) -> Scalar:
    return scalar if scalar.buffer.dtype is F32 else Cast(scalar, F32)


def mul(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.MUL, (a, b))


def exp_of_difference(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.EXP, (Apply(Fn.SUB, (a, b)),))


def le(a: Dim, b: Dim) -> Scalar:
    return Apply(Fn.LE, (DimScalar(a), DimScalar(b)))


def to_all_lanes(found: Buffer) -> list[Stmt]:
    """The largest of its elements, in each."""
    width = found.shape[0].const

    def turned(lane: Dim, by: int) -> Stmt:
        return Store(found, (lane,), larger(Load(found, (lane,)), Load(found, ((lane + by) % width,))))

    return [lanes(width, lambda lane, by=by: turned(lane, by)) for by in halvings(width)]


def larger(a: Scalar, b: Scalar) -> Scalar:
    """One instruction; a NaN that it loses comes back with the exponentials."""
    return Apply(Fn.SELECT, (Apply(Fn.LT, (a, b)), b, a))
