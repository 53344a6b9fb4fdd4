"""WebAssembly: `i16x8.relaxed_dot_i8x16_i7x16_s` for right operands that are small, `i32x4.dot_i16x8_s` for left operands of 16
bits, and for bytes where there is no relaxed SIMD."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, splat
from compiler.machine.instructions.avx2 import signed_by_small, words_by_unsigned
from compiler.machine.instructions.step import Parts, Step

LANES = 4
RELAXED = frozenset(["relaxed-simd"])  # relaxed_madd, relaxed_dot
_SIMD = frozenset(["simd128"])


# Engines differ for right operands of 8 bits, but all are exact for those of 7 bits.
# LLVM orders products by accumulator. Engines on x86 have 16 registers, in which the columns of two loads fit beside eight sums.
SIGNED_BY_SMALL = signed_by_small(
    LANES, "llvm.wasm.relaxed.dot.i8x16.i7x16.signed", "llvm.wasm.dot", RELAXED, unsigned_first=False, unrolled=2
)
WORDS_BY_UNSIGNED = words_by_unsigned(LANES, "llvm.wasm.dot", needs=_SIMD)


def _wide_left(code: Code, x: str) -> Parts:
    """Lower and upper bytes of each half of 32 bits, with their signs."""
    halves = code.op(f"bitcast <4 x i32> {broadcast(code, x, 'i32', LANES)} to <8 x i16>")
    eight = splat("8", "i16", 2 * LANES)
    raised = code.op(f"shl <8 x i16> {halves}, {eight}")
    return code.op(f"ashr <8 x i16> {raised}, {eight}"), code.op(f"ashr <8 x i16> {halves}, {eight}")


WIDE_BY_SMALL = Step(LANES, _wide_left, WORDS_BY_UNSIGNED.right, WORDS_BY_UNSIGNED.add, bits=4, needs=_SIMD)
