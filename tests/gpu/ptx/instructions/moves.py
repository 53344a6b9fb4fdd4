"""Instructions that move, compare, select and convert values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.gpu.ptx.faults import UnknownPtx
from tests.gpu.ptx.instructions.floats import with_one_nan
from tests.gpu.ptx.program import DTYPES, LOCAL_WINDOW, PACKED, SHARED_WINDOW, Array, Assembler, Index, Instruction, Step, bits_of, rule
from tests.gpu.ptx.text import Vector


@rule("mov")
def _mov(code: Assembler, instruction: Instruction) -> Step:
    to, source = instruction.operands
    dtype = DTYPES[instruction.type] if instruction.type != "b128" else None
    if isinstance(source, Vector):
        return _gather_parts(code, to, source, dtype)
    if isinstance(to, Vector):
        return _split_parts(code, to, source, dtype)
    read, write = code.read(source, dtype), code.write(to, dtype)
    return lambda wave, index: write(wave, index, read(wave, index))


def _gather_parts(code: Assembler, to: Any, source: Vector, dtype: Any) -> Step:
    bits = bits_of(dtype) // len(source.parts)
    readers = [code.read(part, np.dtype(f"u{bits // 8}").type) for part in source.parts]
    write = code.write(to, dtype)

    def step(wave: Any, index: Index) -> None:
        value = readers[0](wave, index).astype(dtype)
        for number, read in enumerate(readers[1:], 1):
            value = value | read(wave, index).astype(dtype) << dtype(bits * number)
        write(wave, index, value)

    return step


def _split_parts(code: Assembler, to: Vector, source: Any, dtype: Any) -> Step:
    part = np.dtype(f"u{bits_of(dtype) // len(to.parts) // 8}").type
    read = code.read(source, dtype)
    writers = [code.write(p, part) for p in to.parts]

    def step(wave: Any, index: Index) -> None:
        value = read(wave, index).copy()  # copied because the source may be one of the destinations
        for number, write in enumerate(writers):
            write(wave, index, (value >> dtype(bits_of(part) * number)).astype(part))

    return step


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
JOINED: dict[str, Callable[[Array, Array], Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, dtype: Any) -> Callable[[Array, Array], Array]:
    """Return the function for the PTX comparison `name`. If a float operand is NaN, unordered comparisons such as `ltu` are true, and `ne`
    is false (NumPy's is true)."""
    if np.dtype(dtype).kind in "iub":
        return COMPARISONS[name]
    if name in UNORDERED:
        compare = COMPARISONS[UNORDERED[name]]
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return COMPARISONS[name]


@rule("setp", "set")
def _setp(code: Assembler, instruction: Instruction) -> Step:
    modifiers = [m for m in instruction.modifiers if m != "ftz"]
    to, *sources = instruction.operands
    if modifiers[-1] in PACKED:
        raise UnknownPtx("packed comparisons are not supported")
    dtype = DTYPES[modifiers[-1]]
    compare = _comparison(modifiers[0], dtype)
    first, second = (code.read(operand, dtype) for operand in sources[:2])
    join = JOINED.get(modifiers[1])
    third = code.read(sources[2], np.bool_) if join is not None else None
    if instruction.opcode == "set":
        result = DTYPES[modifiers[-2]]
        one = result(1.0) if np.dtype(result).kind == "f" else np.array(-1).astype(result)
        write = code.write(to, result)
        return lambda wave, index: write(wave, index, np.where(compare(first(wave, index), second(wave, index)), one, result(0)))
    writers = [code.write(part, np.bool_) for part in code.parts(to)]

    def step(wave: Any, index: Index) -> None:
        holds = compare(first(wave, index), second(wave, index))
        other = ~holds if len(writers) > 1 else None
        if third is not None and join is not None:
            condition = third(wave, index)
            holds = join(holds, condition)
            other = join(other, condition) if other is not None else None
        writers[0](wave, index, holds)
        if other is not None:
            writers[1](wave, index, other)

    return step


@rule("selp")
def _selp(code: Assembler, instruction: Instruction) -> Step:
    dtype = np.dtype(f"u{bits_of(DTYPES[instruction.type]) // 8}").type
    to, yes, no, predicate = instruction.operands
    first, second, choose, write = code.read(yes, dtype), code.read(no, dtype), code.read(predicate, np.bool_), code.write(to, dtype)
    return lambda wave, index: write(wave, index, np.where(choose(wave, index), first(wave, index), second(wave, index)))


@rule("slct")
def _slct(code: Assembler, instruction: Instruction) -> Step:
    dtype, condition = DTYPES[instruction.modifiers[-2]], DTYPES[instruction.type]
    to, yes, no, number = instruction.operands
    first, second, choose, write = code.read(yes, dtype), code.read(no, dtype), code.read(number, condition), code.write(to, dtype)
    return lambda wave, index: write(wave, index, np.where(choose(wave, index) >= 0, first(wave, index), second(wave, index)))


TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@rule("testp")
def _testp(code: Assembler, instruction: Instruction) -> Step:
    test = TESTS[instruction.modifiers[0]]
    read, write = code.read(instruction.operands[1], DTYPES[instruction.type]), code.write(instruction.operands[0], np.bool_)
    return lambda wave, index: write(wave, index, test(read(wave, index)))


@rule("cvta")
def _cvta(code: Assembler, instruction: Instruction) -> Step:
    """Convert an address in a state space to a generic address, or back: shared and local memory each have a window in the generic
    space."""
    space = next(m.partition("::")[0] for m in instruction.modifiers if m != "to" and not m.startswith("u"))
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    shift = np.uint64(window if "to" not in instruction.modifiers else (1 << 64) - window if window else 0)
    source = instruction.operands[1]
    read, write = code.read(source, np.uint64), code.write(instruction.operands[0], np.uint64)
    return lambda wave, index: write(wave, index, read(wave, index) + shift)


@rule("isspacep")
def _isspacep(code: Assembler, instruction: Instruction) -> Step:
    number = {"global": 0, "shared": 1, "local": 2}[instruction.modifiers[0].partition("::")[0]]
    read, write = code.read(instruction.operands[1], np.uint64), code.write(instruction.operands[0], np.bool_)
    return lambda wave, index: write(wave, index, wave.space_of(read(wave, index).astype(np.int64)) == number)


# --- conversions ---------------------------------------------------------------------------------------------------------

ROUNDINGS: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
NARROW = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0}


def to_integer(values: Array, dtype: Any) -> Array:
    """Convert floats that are already rounded to integers. Values out of range saturate, and NaN becomes 0."""
    limits = np.iinfo(dtype)
    wide = values.astype(np.float64)
    result = np.clip(np.nan_to_num(wide, nan=0.0, posinf=np.inf, neginf=-np.inf), float(limits.min), float(limits.max))
    inside = result < float(limits.max)
    return np.where(np.isnan(wide), dtype(0), np.where(inside, np.where(inside, result, 0).astype(dtype), dtype(limits.max)))


def to_float(values: Array, dtype: Any, modifiers: tuple[str, ...]) -> Array:
    """Convert to a float type. Round to nearest even, or as the modifier .rz, .rm or .rp says. With .relu, negative numbers become 0. Every
    NaN becomes the canonical one in a type of 16 bits."""
    result = values.astype(dtype)
    directed = next((m for m in ("rz", "rm", "rp") if m in modifiers), None)
    if directed is not None:
        exact, rounded = values.astype(np.float64), result.astype(np.float64)
        wrong = {"rz": np.abs(rounded) > np.abs(exact), "rm": rounded > exact, "rp": rounded < exact}[directed]
        toward = {"rz": np.zeros_like(exact), "rm": np.full_like(exact, -np.inf), "rp": np.full_like(exact, np.inf)}[directed]
        result = np.where(wrong, np.nextafter(result, toward.astype(dtype)), result)
    if "relu" in modifiers:
        result = np.where(result < 0, dtype(0), result)
    result = result.astype(dtype)
    return with_one_nan(result) if result.dtype.itemsize == 2 else result


def _convert(values: Array, to: Any, modifiers: tuple[str, ...]) -> Array:
    from_float, to_integers = values.dtype.kind not in "iu", np.dtype(to).kind in "iu"
    if from_float and "ftz" in modifiers and values.dtype == np.float32:
        values = np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)
    rounding = next((ROUNDINGS[m] for m in modifiers if m in ROUNDINGS), None)
    if rounding is not None:
        values = rounding(values.astype(np.float64) if values.dtype.itemsize == 2 else values).astype(values.dtype)
    if from_float and to_integers:
        return to_integer(values, to)
    if to_integers:
        if "sat" in modifiers:
            limits = np.iinfo(to)
            low, high = max(limits.min, np.iinfo(values.dtype).min), min(limits.max, np.iinfo(values.dtype).max)
            return np.clip(values, low, high).astype(to)
        return values.astype(to)
    result = to_float(values, to, modifiers)
    return np.fmin(np.fmax(np.where(np.isnan(result), to(0), result), to(0)), to(1)).astype(to) if "sat" in modifiers else result


@rule("cvt")
def _cvt(code: Assembler, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers[:-2]
    to, source = instruction.modifiers[-2:]
    if to in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2"):
        return _cvt_pair(code, instruction, to, source, modifiers)
    if "tf32" in (to, source):
        raise UnknownPtx("tf32 is not supported")
    if "satfinite" in modifiers:
        raise UnknownPtx(f"cvt to {to} with .satfinite is not supported")
    dtype, from_ = DTYPES[to], DTYPES[source]
    read, write = code.read(instruction.operands[1], from_), code.write(instruction.operands[0], dtype)
    return lambda wave, index: write(wave, index, _convert(read(wave, index), dtype, modifiers))


def _cvt_pair(code: Assembler, instruction: Instruction, to: str, source: str, modifiers: tuple[str, ...]) -> Step:
    """Convert two floats to a packed pair, whose upper half is the first float, or convert a packed pair to another type."""
    if to in NARROW:
        element, limit = NARROW[to], LARGEST[to]

        def narrow(values: Array) -> Array:
            wide = values.astype(np.float32)
            bounded = np.where(np.isnan(wide), wide, np.clip(wide, -limit, limit))
            if "relu" in modifiers:
                bounded = np.where(bounded < 0, np.float32(0), bounded)
            return bounded.astype(element).view(np.uint8)

        if source == "f16x2":
            read = code.read(instruction.operands[1], np.uint32)
            parts = lambda wave, index: np.ascontiguousarray(read(wave, index)).view(np.float16).reshape(-1, 2)[:, ::-1].T  # noqa: E731
        else:
            readers = [code.read(operand, DTYPES[source]) for operand in instruction.operands[1:]]
            parts = lambda wave, index: [r(wave, index) for r in readers]  # noqa: E731
        write8 = code.write(instruction.operands[0], np.uint16)

        def step8(wave: Any, index: Index) -> None:
            high, low = (narrow(np.ascontiguousarray(part)) for part in parts(wave, index))
            write8(wave, index, high.astype(np.uint16) << np.uint16(8) | low)

        return step8
    element = PACKED[to]
    write = code.write(instruction.operands[0], np.uint32)
    if source in NARROW:
        read8 = code.read(instruction.operands[1], np.uint16)

        def widen(wave: Any, index: Index) -> None:
            pair = np.ascontiguousarray(read8(wave, index)).view(np.uint8).view(NARROW[source]).astype(np.float32).astype(element)
            write(wave, index, pair.view(np.uint32))

        return widen
    first, second = (code.read(operand, DTYPES[source]) for operand in instruction.operands[1:])

    def step(wave: Any, index: Index) -> None:
        high, low = (to_float(read(wave, index), element, modifiers).view(np.uint16).astype(np.uint32) for read in (first, second))
        write(wave, index, high << np.uint32(16) | low)

    return step
