"""Steps for WebAssembly: `i16x8.relaxed_dot_i8x16_i7x16_s` for weights of 4 bits, and `i32x4.dot_i16x8_s` for rows of 16 bits. For engines
without relaxed SIMD, tiles use `i32x4.dot_i16x8_s` for rows of bytes too."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, splat
from compiler.machine.product_steps.avx2 import signed_by_small, words_by_unsigned
from compiler.machine.product_steps.step import Parts, Step, shuffle

LANES = 4
RELAXED = frozenset(["relaxed-simd"])  # the feature of relaxed_madd and relaxed_dot
SHUFFLE = "llvm.wasm.swizzle"
_SIMD = frozenset(["simd128"])


# Engines differ in the results of relaxed_dot if right operands have 8 bits, but all are exact for up to 7 bits. The step uses few
# registers, because engines on x86 have only 16: two loads per iteration leave room for eight sums, and a single row, with its four sums,
# finishes the products of one load before the next.
SIGNED_BY_SMALL = signed_by_small(
    LANES,
    "llvm.wasm.relaxed.dot.i8x16.i7x16.signed",
    "llvm.wasm.dot",
    SHUFFLE,
    RELAXED,
    unsigned_first=False,
    unrolled=2,
    in_order=True,
)
WORDS_BY_UNSIGNED = words_by_unsigned(LANES, "llvm.wasm.dot", needs=_SIMD)


def _wide_left(code: Code, x: str) -> Parts:
    """Return two registers: the lower bytes of the 16-bit halves, and the upper bytes, both sign-extended to 16 bits."""
    halves = code.op(f"bitcast <4 x i32> {broadcast(code, x, 'i32', LANES)} to <8 x i16>")
    eight = splat("8", "i16", 2 * LANES)
    raised = code.op(f"shl <8 x i16> {halves}, {eight}")
    return code.op(f"ashr <8 x i16> {raised}, {eight}"), code.op(f"ashr <8 x i16> {halves}, {eight}")


WIDE_BY_SMALL = Step(
    LANES, _wide_left, WORDS_BY_UNSIGNED.right, WORDS_BY_UNSIGNED.add, bits=4, look_up=shuffle(LANES, SHUFFLE), needs=_SIMD
)
