"""The local buffer that product schedules write in many places."""

from __future__ import annotations

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops import Buffer, Scope


def local(name: str, *shape: int, dtype: DType = DType.F32) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), dtype, Scope.LOCAL)
