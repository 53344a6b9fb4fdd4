"""Shift the mantissas of f32 numbers by counts that are stored in other f32 numbers. A permutation of the bytes of each operand and one
shift replace widening conversions and three shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target

LANES = 16
SCALE_BITS = 24
MANTISSA_BITS, COUNT_BITS = 23, 8


@tile_op
class Shift(Intrinsic):
    """shift(out, mantissas, counts), on 16 lanes: take the low 23 bits of each f32 of `mantissas`, multiply them by 2^24, and shift them
    right by the low 8 bits of the f32 of `counts`. The bit above the 23 bits must be 0, and the count must be less than 64."""

    name: ClassVar[str] = "shift"

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", DType.I64, written=True), Operand("mantissas", DType.F32), Operand("counts", DType.F32)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        shifted, *numbers = arrays
        mantissas, counts = (number[:LANES].view(np.int32).astype(np.int64) for number in numbers)
        mantissas, counts = mantissas & (1 << MANTISSA_BITS) - 1, counts & (1 << COUNT_BITS) - 1
        shifted[:LANES] = mantissas << SCALE_BITS >> counts

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        wide = vec("i64", LANES)
        shifted, mantissas, counts = pointers
        # The code moves three whole bytes: the 23 bits and the bit above them, which is the exponent's lowest bit. The caller makes sure
        # that this bit is 0.
        number = _bytes_of(code, mantissas, (None, None, None, 0, 1, 2, None, None))
        count = _bytes_of(code, counts, (0, *[None] * 7))
        code.do(f"store {wide} {code.op(f'lshr {wide} {number}, {count}')}, ptr {shifted}, align 8")


def _bytes_of(code: Code, numbers: str, place: tuple[int | None, ...]) -> str:
    """Return 8 bytes per lane. `place` has for each of them the index of a byte of the lane's number, or None for a zero byte."""
    count = 4 * LANES
    loaded = code.op(f"load <{count} x i8>, ptr {numbers}, align 4")
    order = [count if byte is None else 4 * lane + byte for lane in range(LANES) for byte in place]
    zeros = f"<{count} x i8> zeroinitializer"
    spread = code.op(f"shufflevector <{count} x i8> {loaded}, {zeros}, <{len(order)} x i32> {vector_literal('i32', order)}")
    return code.op(f"bitcast <{len(order)} x i8> {spread} to {vec('i64', LANES)}")
