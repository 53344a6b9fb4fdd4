"""AVX2 with AVX-VNNI: `vpdpbusd`."""

from __future__ import annotations

from compiler.codegen.intrinsics.steps import Parts, Step
from compiler.codegen.ssa import Code, broadcast, vec


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


SIGNED_BY_UNSIGNED = signed_by_unsigned(8, "llvm.x86.avx512.vpdpbusd.256")
