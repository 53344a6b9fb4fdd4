"""Steps for AVX2: `vpdpbusd` (AVX-VNNI), `vpmaddubsw` for weights of 4 bits, and `vpmaddwd` for rows of 16 bits. AVX-512 and WebAssembly
have similar instructions and use the functions of this file."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast, in_register, splat, vec
from compiler.machine.product_steps.step import Halves, Parts, Step, shuffle

_AVX2 = frozenset(["avx2"])
SHUFFLE = "llvm.x86.avx2.pshuf.b"


def signed_by_unsigned(lanes: int, feature: str, instruction: str, shuffled: str) -> Step:
    """Return the step that uses `vpdpbusd`, which needs the CPU feature `feature`. The panel is the instruction's unsigned operand.
    `instruction` and `shuffled` are LLVM's names of this instruction and of the one that shuffles bytes."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def left(code: Code, x: str) -> Parts:
        return right(code, broadcast(code, x, "i32", lanes))

    def right(code: Code, x: str) -> Parts:
        return (code.op(f"bitcast {words} {x} to {bytes_}"),)

    def add(code: Code, total: str, a: Parts, b: Parts) -> str:
        return code.op(f"call {words} @{instruction}({words} {total}, {bytes_} {b[0]}, {bytes_} {a[0]})")

    return Step(lanes, left, right, add, look_up=shuffle(lanes, shuffled), needs=frozenset([feature]))


def signed_by_small(
    lanes: int,
    pairs: str,
    sums: str,
    shuffled: str,
    needs: frozenset[str] = _AVX2,
    *,
    unsigned_first: bool = True,
    unrolled: int = 4,
    in_order: bool = False,
) -> Step:
    """Return the step that uses `vpmaddubsw`, which adds two products in 16 bits. Weights of 8 bits would saturate the sums; with weights
    up to 15, a register can add up 8 results before it overflows. LLVM's names: `pairs` is the instruction, `sums` the one that adds pairs
    of its results in 32 bits, and `shuffled` the one that shuffles bytes. `unsigned_first` says whether the unsigned operand is the first
    one of `pairs`. For `unrolled` and `in_order`, see `Step`."""
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

    halved, look_up = Halves(8, product, join, widen), shuffle(lanes, shuffled)
    return Step(lanes, left, right, add, 4, halves=halved, unrolled=unrolled, in_order=in_order, look_up=look_up, needs=needs)


def words_by_unsigned(lanes: int, sums: str, needs: frozenset[str] = _AVX2) -> Step:
    """Return the step that multiplies words of 16 bits by bytes, with two `vpmaddwd`: one for the lower bytes of the panel's 16-bit halves,
    and one for the upper bytes. The sums fit in 32 bits. `sums` is LLVM's name of this instruction."""
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


SIGNED_BY_UNSIGNED = signed_by_unsigned(8, "avxvnni", "llvm.x86.avx512.vpdpbusd.256", SHUFFLE)
SIGNED_BY_SMALL = signed_by_small(8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd", SHUFFLE)
WORDS_BY_UNSIGNED = words_by_unsigned(8, "llvm.x86.avx2.pmadd.wd")
