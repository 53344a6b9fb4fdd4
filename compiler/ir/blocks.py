"""The block formats of GGUF whose parts are bits at fixed places: where a block stores its numbers, their scales and their shifts.

A row of a tensor is a sequence of blocks. Groups of a block's numbers share a scale and, in some formats, a shift: value = number * scale -
shift. In some formats, a stored number is a code that stands for another number (`TABLES` in compiler/ir/numbers.py). A scale or a shift
(`Level`) is a float, or an integer times a float of the block, its unit. The function `unpacked`, in NumPy, and the loop nests of
compiler/ops/products/blocks.py read the table `BLOCKS`; compiler/ir/coded_blocks.py has the formats whose numbers are points of grids or
digits of base 3. The process that serves HTTP imports this module to read GGUF files, so the module imports little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind, stored_as

# A function that computes where a number (or the scale of a group) is stored: the index of its byte in the block, or the index of its
# lowest bit in that byte. The argument is the index of the number (or of the group) in the block: a dimension, or an array of integers.
Place = Callable[[Any], Any]
Bytes = NDArray[np.uint8]
SIGN = 0x8000  # the sign bit of an f16
EXPONENT = 0x7C  # the bits of the exponent in the upper byte of an f16, which all are 1 in infinity and NaN


@dataclass(frozen=True, slots=True)
class Bits:
    """Adjacent bits of a byte, which are a part of an integer."""

    count: int
    byte: Place
    shift: Place  # index, in the byte, of the lowest of these bits
    at: int = 0  # index, in the integer, of the lowest of these bits


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers, each made of bits of one or more bytes. `add` is added to each integer. If `is_signed`, the integers are signed bytes."""

    parts: tuple[Bits, ...]
    add: int = 0
    is_signed: bool = False


@dataclass(frozen=True, slots=True)
class Half:
    """An f16 that begins at byte `byte` of the block. If `is_negated`, the level is the negative of this float."""

    byte: int
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Power:
    """A power of two. Byte `byte` of the block is its exponent plus 128."""

    byte: int


Level = Integers | Half | Power


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block format. `num_values` and `num_bytes` are the numbers of values and of bytes in one block. `numbers`, `scale`, `shift` and the
    units describe where a block stores each part. `shift` is None in a format without shifts."""

    name: str
    num_values: int
    num_bytes: int
    numbers: Integers
    scale: Level
    shift: Level | None = None
    scale_unit: Half | None = None  # None: scales and shifts are floats
    shift_unit: Half | None = None
    # How a program stores the values without rounding: as numbers of `bits` bits. `group` numbers share a scale. `kind` says what the bits
    # mean.
    bits: int = 8
    group: int = 32
    kind: Kind = Kind.INT

    @property
    def has_units(self) -> bool:
        """Whether scales and shifts are integers that are multiplied by a float of the block, the unit."""
        return self.scale_unit is not None

    @property
    def middle(self) -> int:
        """The number that is added to signed 4-bit integers, which makes them unsigned, so that two of them can be stored in a byte; 0 for
        all other numbers."""
        return 8 if self.bits == 4 and self.kind is Kind.INT and self.shift is None else 0

    def is_finite(self, blocks: Bytes) -> bool:
        """Return whether all floats in rows of blocks are finite numbers."""
        rows, levels = blocks.reshape(-1, self.num_bytes), (self.scale, self.shift, self.scale_unit, self.shift_unit)
        return not any((rows[:, of.byte + 1] & EXPONENT == EXPONENT).any() for of in levels if isinstance(of, Half))

    def part(self, name: str) -> Level | None:
        """Return where a part is stored. `name` is numbers, scale, shift, scale_unit or shift_unit. Return None if blocks lack the part."""
        return getattr(self, name)

    def extent(self, name: str) -> int:
        """Return the number of elements in which a program stores a part of one block. Two 4-bit numbers are one element. The result has no
        meaning for a part that blocks lack."""
        if name == NUMBERS:
            return self.num_values // 2 if self.bits == 4 else self.num_values
        return 1 if name.endswith("unit") else self.num_values // self.group

    def dtype(self, name: str) -> DType:
        """Return the element type in which a program stores a part."""
        if name == NUMBERS:
            return stored_as(self.bits, self.kind)
        if self.has_units:
            return DType.F32 if name.endswith("unit") else DType.I8
        return DType.BF16 if isinstance(self.part(name), Power) else DType.F16


NUMBERS = "numbers"
PARTS = (NUMBERS, "scale", "scale_unit", "shift", "shift_unit")


def unpacked(blocks: Bytes, format: Blocks, name: str) -> NDArray[Any]:
    """Return the part `name` of blocks [n, num_bytes] as a program stores it, [n, extent]. Two 4-bit numbers are packed in a byte, after
    `middle` is added to them. The format must have the part."""
    part = format.part(name)
    assert part is not None, (format.name, name)
    if name == NUMBERS and format.bits == 4:
        numbers = (_integers(blocks, format.numbers, format.num_values) + format.middle).astype(np.uint8)
        return numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)
    if isinstance(part, Integers):
        return _integers(blocks, part, format.extent(name)).astype(format.dtype(name).numpy)
    return _floats(blocks, part).astype(format.dtype(name).numpy)


def _integers(blocks: Bytes, of: Integers, count: int) -> NDArray[np.int8]:
    """Return the integers of each block as signed bytes, [n, count]. The integers of all formats fit in signed bytes."""
    places, found = np.arange(count), np.full((len(blocks), count), of.add, np.int8)
    for part in of.parts:
        # indexing by an array copies the bytes once; the shift and the mask then compute in bytes, not in wider integers
        bits = blocks[:, part.byte(places)] >> np.broadcast_to(part.shift(places), count).astype(np.uint8) & np.uint8((1 << part.count) - 1)
        found += (bits << np.uint8(part.at)).view(np.int8)
    return found


def _floats(blocks: Bytes, of: Half | Power) -> NDArray[np.float32]:
    if isinstance(of, Power):
        return np.ldexp(np.float32(1), blocks[:, of.byte, None].astype(np.int32) - 128)
    halves = np.ascontiguousarray(blocks[:, of.byte : of.byte + 2]).view("<f2").astype(np.float32)
    return -halves if of.is_negated else halves


# --- the table ---------------------------------------------------------------------------------------------------------


# `first` is the index of the first byte that a function reads, `k` that of a number in the block, and `g` that of a group.


def _zero(_: Any) -> int:
    return 0


def _nibbles(first: int, run: int = 16) -> Bits:
    """Four bits of each number: the low halves of `run` bytes belong to `run` numbers, their high halves to the next `run` numbers."""
    return Bits(4, lambda k: first + k // (2 * run) * run + k % run, lambda k: k // run % 2 * 4)


def _pairs(first: int, at: int = 0) -> Bits:
    """Two bits of each number: the lowest two bits of 32 bytes belong to the first 32 numbers, and the next two bits of these bytes to the
    next 32 numbers. So each 32 bytes belong to 128 numbers. Bit `at` of the number is the lower of the two bits."""
    return Bits(2, lambda k: first + k // 128 * 32 + k % 32, lambda k: k // 32 % 4 * 2, at)


def _single(first: int, at: int) -> Bits:
    """One bit of each number: bit i of byte j, of 32 bytes, belongs to number 32 * i + j, and is bit `at` of that number."""
    return Bits(1, lambda k: first + k % 32, lambda k: k // 32, at)


def _whole(first: int) -> Bits:
    return Bits(8, lambda k: first + k, _zero)


def _fifth(first: int) -> Bits:
    """The fifth bit of each number: bit i of a word of 32 bits belongs to number i."""
    return Bits(1, lambda k: first + k // 8, lambda k: k % 8, 4)


# Scales and shifts (minima) of eight groups, six bits each. For each of the first four groups, the lower six bits of one byte are the
# integer. The other two bits of this byte are the upper two bits of the integer of one of the last four groups, whose lower four bits are
# in bytes 12 to 15.
_SCALES = Integers(
    (Bits(4, lambda g: 4 + g + g // 4 * 4, _zero), Bits(2, lambda g: 4 + g % 4, lambda g: 4 + g // 4 * 2, at=4)),
)
_MINIMA = Integers(
    (Bits(4, lambda g: 8 + g, lambda g: g // 4 * 4), Bits(2, lambda g: 8 + g % 4, lambda g: 4 + g // 4 * 2, at=4)),
)
_K_LEVELS: Mapping[str, Any] = {"scale": _SCALES, "shift": _MINIMA, "scale_unit": Half(0), "shift_unit": Half(2)}
_HALF, _NEGATED = Half(0), Half(2, is_negated=True)

BLOCKS: Mapping[str, Blocks] = {
    format.name: format
    for format in (
        Blocks("q4_0", 32, 18, Integers((_nibbles(2),), add=-8), _HALF, bits=4),
        Blocks("q4_1", 32, 20, Integers((_nibbles(4),)), _HALF, _NEGATED, bits=4),
        Blocks("q5_0", 32, 22, Integers((_nibbles(6), _fifth(2)), add=-16), _HALF),
        Blocks("q5_1", 32, 24, Integers((_nibbles(8), _fifth(4))), _HALF, _NEGATED),
        Blocks("q8_0", 32, 34, Integers((_whole(2),), is_signed=True), _HALF),
        Blocks(
            "q2_k",
            256,
            84,
            Integers((_pairs(16),)),
            Integers((Bits(4, lambda g: g, _zero),)),
            Integers((Bits(4, lambda g: g, lambda _: 4),)),
            Half(80),
            Half(82),
            bits=4,
            group=16,
        ),
        Blocks(
            "q3_k",
            256,
            110,
            Integers((_pairs(32), _single(0, at=2)), add=-4),
            Integers(
                (Bits(4, lambda g: 96 + g % 8, lambda g: g // 8 * 4), Bits(2, lambda g: 104 + g % 4, lambda g: g // 4 * 2, at=4)), add=-32
            ),
            scale_unit=Half(108),
            bits=4,
            group=16,
        ),
        Blocks("q4_k", 256, 144, Integers((_nibbles(16, run=32),)), **_K_LEVELS, bits=4),
        Blocks("q5_k", 256, 176, Integers((_nibbles(48, run=32), _single(16, at=4))), **_K_LEVELS),
        Blocks(
            "q6_k",
            256,
            210,
            Integers((_nibbles(0, run=64), _pairs(128, at=4)), add=-32),
            Integers((_whole(192),), is_signed=True),
            scale_unit=Half(208),
            bits=6,
            group=16,
        ),
        Blocks("iq4_nl", 32, 18, Integers((_nibbles(2),)), _HALF, bits=4, kind=Kind.IQ4),
        Blocks(
            "iq4_xs",
            256,
            136,
            Integers((_nibbles(8),)),
            Integers(
                (Bits(4, lambda g: 4 + g // 2, lambda g: g % 2 * 4), Bits(2, lambda g: 2 + g // 4, lambda g: g % 4 * 2, at=4)), add=-32
            ),
            scale_unit=_HALF,
            bits=4,
            kind=Kind.IQ4,
        ),
        Blocks("tq2_0", 256, 66, Integers((_pairs(0),)), Half(64), bits=4, group=256, kind=Kind.TERNARY),
        Blocks("mxfp4", 32, 17, Integers((_nibbles(1),)), Power(0), bits=4, kind=Kind.E2M1),
    )
}
