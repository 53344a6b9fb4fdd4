"""Integers from what two f32 numbers hold in their low bits, by moving bytes: what would be conversions to twice as many bits and three
shifts is one permutation each and one shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.target import Target

LANES = 16
SCALE_BITS = 24
MANTISSA_BITS, COUNT_BITS = 23, 8


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    shifted, *numbers = arrays
    mantissas, counts = (number[:LANES].view(np.int32).astype(np.int64) for number in numbers)
    mantissas, counts = mantissas & (1 << MANTISSA_BITS) - 1, counts & (1 << COUNT_BITS) - 1
    shifted[:LANES] = mantissas << SCALE_BITS >> counts


def _emit(code: Code, operands: Operands, target: Target) -> None:
    wide = vec("i64", LANES)
    shifted, mantissas, counts = operands.pointers
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


SHIFT = Intrinsic(
    f"shift(out, mantissas, counts): the low {MANTISSA_BITS} bits of a mantissa, behind which stands a 0, times 2^{SCALE_BITS}, are "
    f"shifted down by the low {COUNT_BITS} bits of the count, which are fewer than 64; of {LANES} f32 numbers each",
    _meaning,
    lambda _: True,
    _emit,
)
