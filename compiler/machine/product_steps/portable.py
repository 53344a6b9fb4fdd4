"""Steps for machines without multiply-add instructions for the types of the operands."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, multiply_add, splat, vec
from compiler.machine.product_steps.step import Parts, Step


def bf16_pairs(lanes: int) -> Step:
    """Return the step that multiplies the two elements of each pair as f32. It adds the second product first, as `vdpbf16ps` does."""
    words, floats = vec("i32", lanes), vec("float", lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        second = code.op(f"and {words} {x}, {splat('-65536', 'i32', lanes)}")
        first = code.op(f"shl {words} {x}, {splat('16', 'i32', lanes)}")
        return tuple(code.op(f"bitcast {words} {half} to {floats}") for half in (second, first))

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        for x, y in zip(a, b, strict=True):
            total = multiply_add(code, x, y, total, "float", lanes)
        return total

    return Step(lanes, left, right, add)
