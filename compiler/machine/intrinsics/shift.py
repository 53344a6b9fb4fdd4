"""Integers from what two f32 numbers hold in their low bits, by moving bytes: what would be conversions to twice as many bits and three
shifts is one permutation each and one shift."""

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
    """shift(out, mantissas, counts): the low 23 bits of a mantissa, behind which stands a 0, times 2^24, are shifted down by the low 8 bits
    of the count, which are fewer than 64; of 16 f32 numbers each."""

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
        # Bits of a mantissa that are no whole bytes are below the exponent's last one, which the caller has to be 0.
        number = _bytes_of(code, mantissas, (None, None, None, 0, 1, 2, None, None))
        count = _bytes_of(code, counts, (0, *[None] * 7))
        code.do(f"store {wide} {code.op(f'lshr {wide} {number}, {count}')}, ptr {shifted}, align 8")


def _bytes_of(code: Code, numbers: str, place: tuple[int | None, ...]) -> str:
    """For each lane 8 bytes: those of the number there that are named, and zeros."""
    count = 4 * LANES
    loaded = code.op(f"load <{count} x i8>, ptr {numbers}, align 4")
    order = [count if byte is None else 4 * lane + byte for lane in range(LANES) for byte in place]
    zeros = f"<{count} x i8> zeroinitializer"
    spread = code.op(f"shufflevector <{count} x i8> {loaded}, {zeros}, <{len(order)} x i32> {vector_literal('i32', order)}")
    return code.op(f"bitcast <{len(order)} x i8> {spread} to {vec('i64', LANES)}")
