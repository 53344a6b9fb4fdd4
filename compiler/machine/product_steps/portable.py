"""Steps for machines that have no instruction to multiply and add elements of the operands' types."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, multiply_add, splat, vec
from compiler.machine.product_steps.step import Parts, Step

LANES = 4  # lanes of the steps for integers: registers have at least 128 bits
BYTES, HALVES = (0, 8, 16, 24), (0, 16)  # the lowest bit of each part of a word
ORDER = (0, 16, 8, 24)  # the lowest bits of four neighbours along k in a panel for rows of 16-bit words


def bf16_pairs(lanes: int) -> Step:
    """Return the step that multiplies the two elements of each pair as f32. The step adds the second product first, as `vdpbf16ps` does."""
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


def _one_by_one(signed: tuple[int, ...], unsigned: tuple[int, ...], bits: int) -> Step:
    """Return the step that multiplies the integers of a 32-bit word one after another, in 32 bits. `signed` gives the lowest bit of each
    integer in a word of the left operand, and `unsigned` in a word of the right operand."""
    words, width = vec("i32", LANES), 32 // len(signed)

    def left(code: Code, x: str) -> Parts:
        moved = (code.op(f"shl i32 {x}, {32 - width - low}") for low in signed)
        return tuple(broadcast(code, code.op(f"ashr i32 {part}, {32 - width}"), "i32", LANES) for part in moved)

    def right(code: Code, x: str) -> Parts:
        moved = (code.op(f"lshr {words} {x}, {splat(str(low), 'i32', LANES)}") for low in unsigned)
        return tuple(code.op(f"and {words} {part}, {splat('255', 'i32', LANES)}") for part in moved)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        for x, y in zip(a, b, strict=True):
            total = code.op(f"add {words} {total}, {code.op(f'mul {words} {x}, {y}')}")
        return total

    return Step(LANES, left, right, add, bits=bits)


# Weights of 8 bits are multiplied by rows of 16-bit words, because two planes of bytes would need two products for each weight.
SIGNED_BY_SMALL = _one_by_one(BYTES, BYTES, bits=4)
WORDS_BY_UNSIGNED = _one_by_one(HALVES, ORDER, bits=8)
