"""Elementwise arithmetic instructions, computed in NumPy. Integer results wrap around; integer division rounds toward zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import UnknownPtx
from tests.gpu.ptx.instructions.floats import fused_multiply_add, nan_of
from tests.gpu.ptx.program import DTYPES, PACKED, Array, Assembler, Instruction, Step, rule
from tests.gpu.ptx.text import Immediate

Meaning = Callable[..., Array]


def divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return a / b
    quotient = a // b
    if a.dtype.kind == "i":
        quotient = quotient + ((a % b != 0) & ((a < 0) != (b < 0)))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b + b.dtype.type(1), b)))


def shift_left(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(b >= bits, a.dtype.type(0), a << np.minimum(b, bits - 1).astype(a.dtype))


def shift_right(a: Array, b: Array) -> Array:
    return a >> np.minimum(b, 8 * a.dtype.itemsize - 1).astype(a.dtype) if a.dtype.kind == "i" else np.where(
        b >= 8 * a.dtype.itemsize, a.dtype.type(0), a >> np.minimum(b, 8 * a.dtype.itemsize - 1).astype(a.dtype)
    )  # fmt: skip


def minimum(a: Array, b: Array) -> Array:
    return _of_signed_zeros(np.fmin, a, b, negative=True) if a.dtype.kind not in "iu" else np.minimum(a, b)


def maximum(a: Array, b: Array) -> Array:
    return _of_signed_zeros(np.fmax, a, b, negative=False) if a.dtype.kind not in "iu" else np.maximum(a, b)


def _of_signed_zeros(choose: Any, a: Array, b: Array, *, negative: bool) -> Array:
    """Apply minimum or maximum by the rules of PTX. -0 is less than +0. If one operand is NaN, the result is the other operand. Two NaNs
    give the canonical NaN."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    a, b = np.broadcast_arrays(a, b)
    result = choose(a, b).astype(a.dtype)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        x, y = np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind)
        result = np.where(zeros, ((x | y) if negative else (x & y)).view(a.dtype), result)
    return np.where(np.isnan(a) & np.isnan(b), nan_of(a.dtype), result)


def absolute(a: Array) -> Array:
    return np.abs(a) if a.dtype.kind in "iu" else _bits(a, lambda u, top: u & ~top)


def negate(a: Array) -> Array:
    return (0 - a).astype(a.dtype) if a.dtype.kind in "iu" else _bits(a, lambda u, top: u ^ top)


def _bits(a: Array, change: Callable[[Array, Any], Array]) -> Array:
    unsigned = np.dtype(f"u{a.dtype.itemsize}").type
    return change(np.ascontiguousarray(a).view(unsigned), unsigned(1 << (8 * a.dtype.itemsize - 1))).view(a.dtype)


def high_product(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if bits == 64:
        wide = a.astype(object) * b.astype(object) >> 64
        return np.array([int(v) & (2**64 - 1) for v in np.atleast_1d(wide)], np.uint64).view(a.dtype)
    wider = np.dtype(f"{a.dtype.kind}{bits // 4}")
    return (a.astype(wider) * b.astype(wider) >> wider.type(bits)).astype(a.dtype)


ONE_TYPE: dict[str, Meaning] = {  # instructions whose operands and result have the type that the instruction names
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "div": divide,
    "rem": remainder,
    "min": minimum,
    "max": maximum,
    "abs": absolute,
    "neg": negate,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "copysign": lambda a, b: np.copysign(b, a),
    "sad": lambda a, b, c: np.where(a > b, a - b, b - a) + c,
}

# f32 functions that the hardware approximates with an error of one or two units in the last place. Here they are computed in f64 and
# rounded.
APPROXIMATIONS: dict[str, Meaning] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _apply(code: Assembler, instruction: Instruction, meaning: Meaning, dtypes: list[Any], result: Any) -> Step:
    """Return a step that applies the NumPy function `meaning` to the source operands and writes the result to the first operand."""
    readers = [code.read(operand, dtype) for operand, dtype in zip(instruction.operands[1:], dtypes, strict=True)]
    write = code.write(instruction.operands[0], result)
    if len(readers) == 1:
        (only,) = readers
        return lambda wave, index: write(wave, index, meaning(only(wave, index)))
    if len(readers) == 2:
        first, second = readers
        return lambda wave, index: write(wave, index, meaning(first(wave, index), second(wave, index)))
    return lambda wave, index: write(wave, index, meaning(*(read(wave, index) for read in readers)))


def _modified(instruction: Instruction, meaning: Meaning, dtype: Any) -> Meaning:
    """Return `meaning` as changed by the instruction's modifiers: .ftz flushes subnormals, .sat clamps to [0, 1], .relu replaces negative
    results by 0. The only supported rounding mode is .rn."""
    modifiers = instruction.modifiers[:-1]
    for mode in ("rz", "rm", "rp", "cc"):
        if mode in modifiers:
            raise UnknownPtx(f".{mode} is not supported")
    result = meaning
    if "ftz" in modifiers and np.dtype(dtype).itemsize == 4:
        tiny = np.finfo(np.float32).tiny

        def flush(value: Array) -> Array:
            return np.where(np.abs(value) < tiny, np.copysign(np.float32(0), value), value)

        inner = result
        result = lambda *operands: flush(inner(*(flush(o) for o in operands)))  # noqa: E731
    if "sat" in modifiers:
        if np.dtype(dtype).kind in "iu":
            raise UnknownPtx(".sat of integers is not supported")
        inner_sat = result
        result = lambda *operands: np.fmin(np.fmax(np.nan_to_num(inner_sat(*operands), nan=0.0), 0), 1).astype(dtype)  # noqa: E731
    if "relu" in modifiers:
        inner_relu = result
        result = lambda *operands: np.fmax(inner_relu(*operands), 0).astype(dtype)  # noqa: E731
    return result


def _pairs(meaning: Meaning, element: Any) -> Meaning:
    """Return a function that applies `meaning` to both 16-bit halves of each 32-bit operand."""
    return lambda *words: (
        meaning(*(np.ascontiguousarray(w).view(element).reshape(-1, 2) for w in words)).astype(element).view(np.uint32)[:, 0]
    )


def _of_one_type(code: Assembler, instruction: Instruction, meaning: Meaning) -> Step:
    type_ = instruction.type
    count = len(instruction.operands) - 1
    if type_ in PACKED:
        return _apply(
            code, instruction, _pairs(_modified(instruction, meaning, PACKED[type_]), PACKED[type_]), [np.uint32] * count, np.uint32
        )
    dtype = DTYPES[type_]
    return _apply(code, instruction, _modified(instruction, meaning, dtype), [dtype] * count, dtype)


@rule(*ONE_TYPE)
def _one_type(code: Assembler, instruction: Instruction) -> Step:
    return _of_one_type(code, instruction, ONE_TYPE[instruction.opcode])


@rule(*APPROXIMATIONS)
def _approximation(code: Assembler, instruction: Instruction) -> Step:
    meaning, type_ = APPROXIMATIONS[instruction.opcode], instruction.type
    element = PACKED.get(type_, DTYPES[type_])
    return _of_one_type(code, instruction, lambda a: meaning(a.astype(np.float64)).astype(element))


@rule("fma")
def _fma(code: Assembler, instruction: Instruction) -> Step:
    return _of_one_type(code, instruction, fused_multiply_add)


def _wide(type_: str) -> tuple[Any, Any]:
    narrow = DTYPES[type_]
    return narrow, np.dtype(f"{np.dtype(narrow).kind}{2 * np.dtype(narrow).itemsize}").type


@rule("mul", "mul24")
def _mul(code: Assembler, instruction: Instruction) -> Step:
    if "wide" in instruction.modifiers:
        narrow, wide = _wide(instruction.type)
        return _apply(code, instruction, lambda a, b: a.astype(wide) * b.astype(wide), [narrow] * 2, wide)
    return _of_one_type(code, instruction, high_product if "hi" in instruction.modifiers else lambda a, b: a * b)


@rule("mad", "mad24")
def _mad(code: Assembler, instruction: Instruction) -> Step:
    if "wide" in instruction.modifiers:
        narrow, wide = _wide(instruction.type)
        return _apply(code, instruction, lambda a, b, c: a.astype(wide) * b.astype(wide) + c, [narrow, narrow, wide], wide)
    if DTYPES[instruction.type] in (np.float32, np.float64):
        return _fma(code, instruction)
    if "hi" in instruction.modifiers:
        return _of_one_type(code, instruction, lambda a, b, c: high_product(a, b) + c)
    return _of_one_type(code, instruction, lambda a, b, c: a * b + c)


@rule("shl", "shr")
def _shift(code: Assembler, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.type]
    left, count = instruction.opcode == "shl", instruction.operands[2]
    if isinstance(count, Immediate) and 0 <= count.value < 8 * np.dtype(dtype).itemsize:
        by = dtype(count.value)
        read, write = code.read(instruction.operands[1], dtype), code.write(instruction.operands[0], dtype)
        return (
            (lambda wave, index: write(wave, index, read(wave, index) << by))
            if left
            else (lambda wave, index: write(wave, index, read(wave, index) >> by))
        )
    return _apply(code, instruction, shift_left if left else shift_right, [dtype, np.uint32], dtype)


@rule("shf")
def _funnel(code: Assembler, instruction: Instruction) -> Step:
    left, wrap = "l" in instruction.modifiers, "wrap" in instruction.modifiers

    def funnel(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31)) if wrap else np.minimum(c, np.uint32(32))
        both = b.astype(np.uint64) << np.uint64(32) | a
        shift = (np.uint32(32) - count) if left else count
        return (both >> shift.astype(np.uint64)).astype(np.uint32)

    return _apply(code, instruction, funnel, [np.uint32] * 3, np.uint32)


@rule("bfe")
def _bfe(code: Assembler, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.type]
    bits = 8 * np.dtype(dtype).itemsize
    unsigned = np.dtype(f"u{bits // 8}").type

    def extract(a: Array, position: Array, length: Array) -> Array:
        position, length = position & np.uint32(255), length & np.uint32(255)
        mask = _mask(length, bits, unsigned)
        field = shift_right(np.ascontiguousarray(a).view(unsigned), position) & mask
        if np.dtype(dtype).kind == "u":
            return field
        top = np.minimum(position + length - np.uint32(1), np.uint32(bits - 1))
        sign = (shift_right(np.ascontiguousarray(a).view(unsigned), top) & unsigned(1)) != 0
        return np.where((length > 0) & sign, field | ~mask, field).view(dtype)

    return _apply(code, instruction, extract, [dtype, np.uint32, np.uint32], dtype)


def _mask(length: Array, bits: int, unsigned: Any) -> Array:
    one = np.ones(1, unsigned)
    return np.where(length >= bits, ~np.zeros(1, unsigned), (one << np.minimum(length, bits - 1).astype(unsigned)) - one)


@rule("bfi")
def _bfi(code: Assembler, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.type]
    bits = 8 * np.dtype(dtype).itemsize

    def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
        mask = shift_left(_mask(length & np.uint32(255), bits, dtype), position & np.uint32(255))
        return b & ~mask | shift_left(a, position & np.uint32(255)) & mask

    return _apply(code, instruction, insert, [dtype, dtype, np.uint32, np.uint32], dtype)


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    left, result = a.copy(), np.zeros(a.shape, np.uint32)
    step = bits // 2
    while step:
        clear = left >> a.dtype.type(bits - step) == 0
        result += np.where(clear, np.uint32(step), np.uint32(0))
        left = np.where(clear, left << a.dtype.type(step), left)
        step //= 2
    return np.where(a == 0, np.uint32(bits), result)


def _reversed(a: Array) -> Array:
    kind = a.dtype.type
    for step in (1, 2, 4, 8, 16, 32):
        if step < 8 * a.dtype.itemsize:
            mask = kind(sum(((1 << step) - 1) << at for at in range(0, 8 * a.dtype.itemsize, 2 * step)))
            a = (a & mask) << kind(step) | a >> kind(step) & mask
    return a


@rule("popc", "clz", "brev", "bfind", "fns")
def _count(code: Assembler, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.type]
    match instruction.opcode:
        case "popc":
            return _apply(code, instruction, lambda a: np.bitwise_count(a).astype(np.uint32), [dtype], np.uint32)
        case "clz":
            return _apply(code, instruction, _leading_zeros, [dtype], np.uint32)
        case "brev":
            return _apply(code, instruction, _reversed, [dtype], dtype)
        case "bfind":
            unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}").type
            shift = "shiftamt" in instruction.modifiers
            bits = np.uint32(8 * np.dtype(dtype).itemsize - 1)

            def find(a: Array) -> Array:
                a = np.where(a < 0, ~a, a) if np.dtype(dtype).kind == "i" else a
                zeros = _leading_zeros(a.astype(unsigned))
                return np.where(a == 0, np.uint32(0xFFFFFFFF), zeros if shift else bits - zeros)

            return _apply(code, instruction, find, [dtype], np.uint32)
        case _:
            raise UnknownPtx("not supported")


@rule("prmt")
def _prmt(code: Assembler, instruction: Instruction) -> Step:
    if len(instruction.modifiers) > 1:
        raise UnknownPtx("only the default mode of prmt is supported")
    selector = instruction.operands[3]
    if isinstance(selector, Immediate) and not selector.value & 0x8888:  # no byte is a sign
        columns = [selector.value >> 4 * place & 7 for place in range(4)]

        def pick(a: Array, b: Array, _selector: Array) -> Array:
            both = np.stack(np.broadcast_arrays(a, b), 1).view(np.uint8)  # [threads, 8]
            return np.ascontiguousarray(both[:, columns]).view(np.uint32)[:, 0]

        return _apply(code, instruction, pick, [np.uint32] * 3, np.uint32)

    def permute(a: Array, b: Array, selector: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(1, np.uint32)
        for place in range(4):
            choice = (selector >> np.uint32(4 * place)).astype(np.uint64) & np.uint64(15)
            byte = (both >> (choice & np.uint64(7)) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            result = result | np.where(choice & np.uint64(8), sign, byte) << np.uint32(8 * place)
        return result

    return _apply(code, instruction, permute, [np.uint32] * 3, np.uint32)


@rule("lop3")
def _lop3(code: Assembler, instruction: Instruction) -> Step:
    dtype = np.uint32

    def combine(a: Array, b: Array, c: Array, table: Array) -> Array:
        bits = int(table[0])
        result = np.zeros(1, dtype)
        for row in range(8):
            if bits >> row & 1:
                result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return _apply(code, instruction, combine, [dtype] * 4, dtype)


@rule("dp4a")
def _dp4a(code: Assembler, instruction: Instruction) -> Step:
    kinds = [np.int8 if name == "s32" else np.uint8 for name in instruction.modifiers[-2:]]
    result = np.int32 if "s32" in instruction.modifiers[-2:] else np.uint32

    def dot(a: Array, b: Array, c: Array) -> Array:
        x, y = (np.ascontiguousarray(v).view(kind).reshape(-1, 4).astype(np.int64) for v, kind in zip((a, b), kinds, strict=True))
        return ((x * y).sum(1) + c).astype(result)

    return _apply(code, instruction, dot, [np.uint32, np.uint32, result], result)
