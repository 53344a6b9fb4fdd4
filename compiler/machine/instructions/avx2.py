"""AVX2 steps: `vpdpbusd` (AVX-VNNI), `vpmaddubsw` for small right operands, `vpmaddwd` for left operands of 16 bits."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, in_register, splat, vec
from compiler.machine.instructions.step import Halves, Parts, Step

_AVX2 = frozenset(["avx2"])


def signed_by_unsigned(lanes: int, feature: str, instruction: str) -> Step:
    """Multiply by `vpdpbusd`, whose unsigned operand is the panel."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        return code.op(f"call {words} @{instruction}({words} {total}, {bytes_} {b[0]}, {bytes_} {a[0]})")

    return Step(lanes, left, right, add, needs=frozenset([feature]))


def signed_by_small(
    lanes: int,
    pairs: str,
    sums: str,
    needs: frozenset[str] = _AVX2,
    *,
    unsigned_first: bool = True,
    unrolled: int = 4,
    in_order: bool = False,
) -> Step:
    """Multiply by `vpmaddubsw`, which adds two products in 16 bits and would saturate for weights of 8 bits. For weights up to 15, 8 such
    sums fit in 16 bits. `unsigned_first` says whether the unsigned operand is the instruction's first one."""
    words, halves, bytes_ = vec("i32", lanes), vec("i16", 2 * lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def product(code: Code, a: Parts, b: Parts) -> str:
        first, second = (b[0], a[0]) if unsigned_first else (a[0], b[0])
        return code.op(f"call {halves} @{pairs}({bytes_} {first}, {bytes_} {second})")

    def join(code: Code, x: str, y: str) -> str:
        return code.op(f"add {halves} {x}, {y}")

    def widen(code: Code, total: str, x: str) -> str:
        ones = splat("1", "i16", 2 * lanes)
        ones = in_register(code, ones, halves) if in_order else ones
        two = code.op(f"call {words} @{sums}({halves} {x}, {halves} {ones})")
        return code.op(f"add {words} {total}, {two}")

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        return widen(code, total, product(code, a, b))

    return Step(lanes, left, right, add, bits=4, halves=Halves(8, product, join, widen), unrolled=unrolled, in_order=in_order, needs=needs)


def words_by_unsigned(lanes: int, sums: str, needs: frozenset[str] = _AVX2) -> Step:
    """Multiply 16-bit words by bytes, with `vpmaddwd`: by the lower byte of each 16-bit half of the panel, and by the upper one. The sums
    stay within 32 bits."""
    words, halves = vec("i32", lanes), vec("i16", 2 * lanes)

    def left(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {broadcast(code, x, 'i32', lanes)} to {halves}"),)

    def right(code: Code, x: str) -> Parts:
        both = code.op(f"bitcast {words} {x} to {halves}")
        lower = code.op(f"and {halves} {both}, {splat('255', 'i16', 2 * lanes)}")
        return lower, code.op(f"lshr {halves} {both}, {splat('8', 'i16', 2 * lanes)}")

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        for x, y in zip(a, b, strict=True):
            two = code.op(f"call {words} @{sums}({halves} {y}, {halves} {x})")
            total = code.op(f"add {words} {total}, {two}")
        return total

    return Step(lanes, left, right, add, needs=needs)


SIGNED_BY_UNSIGNED = signed_by_unsigned(8, "avxvnni", "llvm.x86.avx512.vpdpbusd.256")
SIGNED_BY_SMALL = signed_by_small(8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
WORDS_BY_UNSIGNED = words_by_unsigned(8, "llvm.x86.avx2.pmadd.wd")
