"""AVX2: `vpdpbusd` where AVX-VNNI is present, else `vpmaddwd` on 16 bits. Both are exact for all i8."""

from __future__ import annotations

from compiler.codegen.intrinsics.steps import Parts, Step
from compiler.codegen.ssa import Code, broadcast, splat, vec


def fours_by_vnni(lanes: int, instruction: str) -> Step:
    """The instruction takes unsigned numbers on the left: a + 128, which adds 128 times the sum of b too much."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        # Before it is spread: LLVM 22 does not come to an end over the same on 64 bytes (VBMI).
        offset = code.op(f"xor i32 {x}, {0x80808080 - 2**32}")
        return right(code, broadcast(code, offset, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        return code.op(f"call {words} @{instruction}({words} {total}, {bytes_} {a[0]}, {bytes_} {b[0]})")

    def excess(code: Code, total: str, b: Parts) -> str:
        return add(code, total, (splat("-128", "i8", 4 * lanes),), b)

    return Step(lanes, left, right, add, excess)


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


def fours_by_pairs(lanes: int, instruction: str) -> Step:
    """Even and odd bytes widened to 16 bits; two products and their sum fit 32."""
    words, halves = vec("i32", lanes), vec("i16", 2 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        eight = splat("8", "i16", 2 * lanes)
        x = code.op(f"bitcast {words} {x} to {halves}")
        even = code.op(f"ashr {halves} {code.op(f'shl {halves} {x}, {eight}')}, {eight}")
        return even, code.op(f"ashr {halves} {x}, {eight}")

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        for x, y in zip(a, b, strict=True):
            total = code.op(f"add {words} {total}, {code.op(f'call {words} @{instruction}({halves} {x}, {halves} {y})')}")
        return total

    return Step(lanes, left, right, add)


I8_FOURS_VNNI = fours_by_vnni(8, "llvm.x86.avx512.vpdpbusd.256")
I8_FOURS_BY_PAIRS = fours_by_pairs(8, "llvm.x86.avx2.pmadd.wd")
SIGNED_BY_UNSIGNED = signed_by_unsigned(8, "llvm.x86.avx512.vpdpbusd.256")
