"""AVX2: `vpdpbusd` (AVX-VNNI), or `vpmaddubsw` and `vpmaddwd` for right operands that are small."""

from __future__ import annotations

from compiler.codegen.intrinsics.steps import Parts, Step
from compiler.codegen.ssa import Code, broadcast, splat, vec


def signed_by_unsigned(lanes: int, instruction: str) -> Step:
    """As the instruction multiplies: the panel's bytes are its unsigned operand."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        return code.op(f"call {words} @{instruction}({words} {total}, {bytes_} {b[0]}, {bytes_} {a[0]})")

    return Step(lanes, left, right, add)


def signed_by_small(lanes: int, pairs: str, sums: str) -> Step:
    """Two products are added in 16 bits, which would saturate if both were of eight bits."""
    words, halves, bytes_ = vec("i32", lanes), vec("i16", 2 * lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        two = code.op(f"call {halves} @{pairs}({bytes_} {b[0]}, {bytes_} {a[0]})")
        four = code.op(f"call {words} @{sums}({halves} {two}, {halves} {splat('1', 'i16', 2 * lanes)})")
        return code.op(f"add {words} {total}, {four}")

    return Step(lanes, left, right, add, bits=4)


SIGNED_BY_UNSIGNED = signed_by_unsigned(8, "llvm.x86.avx512.vpdpbusd.256")
SIGNED_BY_SMALL = signed_by_small(8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
