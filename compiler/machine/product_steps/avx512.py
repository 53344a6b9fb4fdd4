"""Steps for AVX-512: `vdpbf16ps` (BF16), `vpdpbusd` (VNNI), `vpmaddubsw` and `vpmaddwd`. The file also names the CPU features that other
AVX-512 instructions need."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast
from compiler.machine.product_steps.avx2 import signed_by_small, signed_by_unsigned, words_by_unsigned
from compiler.machine.product_steps.step import Parts, Step

SCALE_EXPONENT = frozenset(["avx512f", "avx512vl"])  # required by vscalefps
SHUFFLE = "llvm.x86.avx512.pshuf.b.512"
PACK_LANES = frozenset(["avx512f"])  # required by vpcompressd


def _left(code: Code, x: str) -> Parts:
    return _right(code, broadcast(code, x, "i32", 16))


def _right(code: Code, x: str) -> Parts:
    return (code.op(f"bitcast <16 x i32> {x} to <32 x bfloat>"),)


def _add_pairs(code: Code, total: str, left: Parts, right: Parts) -> str:
    """Add the products of pairs. The left operand comes last, because the instruction can broadcast its last operand from memory."""
    args = f"<16 x float> {total}, <32 x bfloat> {right[0]}, <32 x bfloat> {left[0]}"
    return code.op(f"call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512({args})")


BF16_PAIRS = Step(16, _left, _right, _add_pairs, needs=frozenset(["avx512bf16"]))
SIGNED_BY_UNSIGNED = signed_by_unsigned(16, "avx512vnni", "llvm.x86.avx512.vpdpbusd.512", SHUFFLE)
SIGNED_BY_SMALL = signed_by_small(16, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512", SHUFFLE)
WORDS_BY_UNSIGNED = words_by_unsigned(16, "llvm.x86.avx512.pmaddw.d.512")
