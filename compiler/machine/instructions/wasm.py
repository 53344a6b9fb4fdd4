"""WebAssembly: `i32x4.relaxed_dot_i8x16_i7x16_add_s` for right operands that are small, `i32x4.dot_i16x8_s` for left operands of 16
bits, and for bytes where there is no relaxed SIMD."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, splat
from compiler.machine.instructions.avx2 import words_by_unsigned
from compiler.machine.instructions.step import Parts, Step

LANES = 4
RELAXED = frozenset(["relaxed-simd"])  # relaxed_madd, relaxed_dot
_SIMD = frozenset(["simd128"])


def _left(code: Code, x: str) -> Parts:
    return _right(code, broadcast(code, x, "i32", LANES))


def _right(code: Code, x: str) -> Parts:
    return (code.op(f"bitcast <4 x i32> {x} to <16 x i8>"),)


def _add(code: Code, total: str, left: Parts, right: Parts) -> str:
    """Add the products. Engines differ for right operands of 8 bits, but all are exact for those of 7 bits."""
    args = f"<16 x i8> {left[0]}, <16 x i8> {right[0]}, <4 x i32> {total}"
    return code.op(f"call <4 x i32> @llvm.wasm.relaxed.dot.i8x16.i7x16.add.signed({args})")


SIGNED_BY_SMALL = Step(LANES, _left, _right, _add, bits=4, needs=RELAXED)
WORDS_BY_UNSIGNED = words_by_unsigned(LANES, "llvm.wasm.dot", needs=_SIMD)


def _wide_left(code: Code, x: str) -> Parts:
    """Lower and upper bytes of each half of 32 bits, with their signs."""
    halves = code.op(f"bitcast <4 x i32> {broadcast(code, x, 'i32', LANES)} to <8 x i16>")
    eight = splat("8", "i16", 2 * LANES)
    raised = code.op(f"shl <8 x i16> {halves}, {eight}")
    return code.op(f"ashr <8 x i16> {raised}, {eight}"), code.op(f"ashr <8 x i16> {halves}, {eight}")


WIDE_BY_SMALL = Step(LANES, _wide_left, WORDS_BY_UNSIGNED.right, WORDS_BY_UNSIGNED.add, bits=4, needs=_SIMD)
