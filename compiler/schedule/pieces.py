"""Small expressions, and the local buffer, that schedules write in many places."""

from __future__ import annotations

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, DimScalar, Fn, Load, Scalar, Scope

F32 = DType.F32


def plus(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.ADD, (a, b))


def local(name: str, *shape: int) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), F32, Scope.LOCAL)


def f32(scalar: Load) -> Scalar:
    return scalar if scalar.buffer.dtype is F32 else Cast(scalar, F32)


def mul(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.MUL, (a, b))


def exp_of_difference(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.EXP, (Apply(Fn.SUB, (a, b)),))


def le(a: Dim, b: Dim) -> Scalar:
    return Apply(Fn.LE, (DimScalar(a), DimScalar(b)))
