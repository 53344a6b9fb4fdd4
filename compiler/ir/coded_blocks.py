"""The block formats of GGUF whose blocks NumPy splits into parts when a tensor is read: IQ1, IQ2, IQ3 and TQ1_0.

The numbers of these formats are coordinates of grid points (compiler/ir/grids.py) or digits of base 3, which the loop nests of
compiler/ops/products/blocks.py cannot decode. A program stores the 256 numbers of a block as codes of 4 bits; each code is the index of a
number in a table of compiler/ir/numbers.py. A code of a grid consists of the index of a magnitude in its lower three bits, and of a sign in
its upper bit (in IQ1, the upper bit chooses one of two offsets instead). `_codes` makes eight codes at a time, as a word: the grid gives a
word with their lower bits, and the exclusive or with a word of eight signs sets their upper bits. A value is its number times the scale of
its group. A scale is a float of the block, or an odd integer times that float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dtypes import DType
from compiler.ir.grids import GRIDS
from compiler.ir.numbers import TABLES, Kind

Bytes = NDArray[np.uint8]
Array = NDArray[Any]

NUM_VALUES = 256
CHUNK_BLOCKS = 1 << 12  # number of blocks taken apart at a time: few enough that intermediate arrays stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Read:
    """The parts of n blocks: codes [n, 128], two per byte; levels [n, groups], where 2 * level + 1 is the integer scale of a group, or None
    if a block has one scale; and the float of each block, [n, 1]."""

    codes: Array
    levels: Array | None
    unit: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """A block format. `read` splits blocks [n, num_bytes] into their parts, and `kind` names the table with the numbers of the codes."""

    name: str
    num_bytes: int
    read: Callable[[Bytes], Read]
    kind: Kind
    group: int = NUM_VALUES  # number of numbers that share a scale
    factor: float = 1.0  # a power of two by which a block's float is multiplied; it makes the numbers and the scales integers

    @property
    def num_values(self) -> int:
        return NUM_VALUES

    @property
    def has_units(self) -> bool:
        """Whether scales are integers that are multiplied by a float of the block, the unit. Otherwise a block has one scale, a float."""
        return self.group < NUM_VALUES

    @property
    def scale_dtype(self) -> DType:
        """The element type in which a program stores the float of a block: f32 for the unit of its scales, f16 for its only scale."""
        return DType.F32 if self.has_units else DType.F16

    def parts(self, blocks: Bytes) -> tuple[Array, ...]:
        """Split rows of blocks [..., bytes] into their parts. Return the codes (two per byte), the scales and, if the scales are integers,
        their units. The last axis of each part has the elements of all blocks of a row, in order; the other axes are those of `blocks`. The
        float of a block is multiplied by `factor`."""
        *rows, length = blocks.shape
        each = blocks.reshape(-1, self.num_bytes)
        found = [np.empty((len(each), count), dtype) for count, dtype in self._extents]
        for start in range(0, len(each), CHUNK_BLOCKS):
            at = slice(start, start + CHUNK_BLOCKS)
            read = self.read(each[at])
            with np.errstate(invalid="ignore"):  # NaN and infinity are refused elsewhere (compiler/frontend/finite.py)
                found[0][at], found[-1][at] = read.codes, read.unit.astype(np.float32) * np.float32(self.factor)
            if read.levels is not None:
                found[1][at] = 2 * read.levels + 1
        return tuple(part.reshape(*rows, length // self.num_bytes * part.shape[1]) for part in found)

    def values(self, blocks: Bytes) -> NDArray[np.float32]:
        """Decode blocks [n, num_bytes] to one flat array of all their values, in order."""
        codes, scale, *units = self.parts(blocks)
        halves = np.stack([codes & 15, codes >> 4], -1).reshape(-1, self.group)
        with np.errstate(invalid="ignore"):
            scales = scale.astype(np.float32) * (units[0] if units else np.float32(1))
            return (TABLES[self.kind][halves] * scales.reshape(-1, 1)).reshape(-1)

    @property
    def _extents(self) -> Sequence[tuple[int, np.dtype[Any]]]:
        """The number of elements of each part of a block, and their type."""
        codes, unit = (NUM_VALUES // 2, DType.U8.numpy), (1, self.scale_dtype.numpy)
        return (codes, (NUM_VALUES // self.group, DType.I8.numpy), unit) if self.has_units else (codes, unit)


# --- helpers of the readers ---------------------------------------------------------------------------------------------


@lru_cache
def _grid(name: str) -> Array:
    return GRIDS[name].codes()


@lru_cache
def _signs() -> NDArray[np.uint32]:
    """Return for each byte a word of eight codes of 4 bits: bit i of the byte is the upper bit of code i, its sign. The other bits are
    0."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little").astype(np.uint32)
    return (bits << 4 * np.arange(8, dtype=np.uint32) + 3).sum(1, dtype=np.uint32)


@lru_cache
def _even_signs() -> NDArray[np.uint32]:
    """Return a word of eight signs, as `_signs` does, for each integer of seven bits. The eighth sign makes the number of negative codes
    even."""
    seven = np.arange(128)
    return _signs()[seven | np.bitwise_xor.reduce(seven[:, None] >> np.arange(7) & 1, 1) << 7]


def _codes(name: str, indices: Array, signs: Array) -> Bytes:
    """Return the codes of the points of grid `name` with these `indices`, two per byte. `signs` are words with the signs of eight codes."""
    return np.ascontiguousarray(_grid(name)[indices].view("<u4") ^ signs).view(np.uint8)


def _words(blocks: Bytes, first: int, count: int, dtype: str) -> Array:
    return np.ascontiguousarray(blocks[:, first : first + count * np.dtype(dtype).itemsize]).view(dtype)


def _fields(words: Array, bits: int, shifts: Sequence[int]) -> Array:
    """Return the fields of `bits` bits that begin at the given bits of each word, in order: words [n, words] give [n, words * fields]."""
    found = words[:, :, None] >> np.array(shifts, words.dtype) & words.dtype.type((1 << bits) - 1)
    return found.reshape(len(words), -1)


def _joined(low: Array, high: Array) -> Array:
    """Return indices whose lower eight bits are `low`, and whose other bits are `high`."""
    return low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)


def _half(blocks: Bytes, first: int = 0) -> NDArray[np.float16]:
    return _words(blocks, first, 1, "<f2")


NIBBLES, SEVENS = (0, 4), (0, 7, 14, 21)  # the first bits of fields of 4 bits in a byte, and of 7 bits in a word


# --- the readers --------------------------------------------------------------------------------------------------------


def _tq1_0(blocks: Bytes) -> Read:
    """A byte b holds five digits of base 3, as the fraction b / 256: the first digit is the integer part of 3 * b / 256, and 3 * b modulo
    256 holds the later digits. Bytes 48 to 51 hold four digits each, and the float of the block follows them."""
    runs = []
    for first, count, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        powers = 3 ** np.arange(digits, dtype=np.uint8)
        runs.append((blocks[:, None, first : first + count] * powers[:, None]).reshape(len(blocks), -1))
    numbers = (np.concatenate(runs, 1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return Read(numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4), None, _half(blocks, 52))


def _iq1_s(blocks: Bytes) -> Read:
    high = _words(blocks, 34, 8, "<u2")
    indices = _joined(blocks[:, 2:34], _fields(high, 3, (0, 3, 6, 9)))
    signs = np.repeat((high >> np.uint16(15)).astype(np.uint32) * np.uint32(0x88888888), 4, 1)
    return Read(_codes("iq1", indices, signs), _fields(high, 3, (12,)), _half(blocks))


def _iq1_m(blocks: Bytes) -> Read:
    high, scales = _fields(blocks[:, 32:48], 4, NIBBLES), _words(blocks, 48, 4, "<u2")
    indices = _joined(blocks[:, :32], high & np.uint8(7))
    signs = (high >> np.uint8(3)).astype(np.uint32) * np.uint32(0x88888888)
    # Each of the four words of scales has four bits of the block's float, in its highest bits.
    unit = (_fields(scales, 4, (12,)) << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16, keepdims=True).view(np.float16)
    return Read(_codes("iq1", indices, signs), _fields(scales, 3, (0, 3, 6, 9)), unit)


def _iq2_xxs(blocks: Bytes) -> Read:
    pairs = _words(blocks, 2, 16, "<u4").reshape(len(blocks), 8, 2)
    indices, signs = np.ascontiguousarray(pairs[:, :, 0]).view(np.uint8), _fields(pairs[:, :, 1], 7, SEVENS)
    return Read(_codes("iq2_xxs", indices, _even_signs()[signs]), pairs[:, :, 1] >> np.uint32(28), _half(blocks))


def _iq2_xs(blocks: Bytes) -> Read:
    words = _words(blocks, 2, 32, "<u2")
    codes = _codes("iq2_xs", words & np.uint16(511), _even_signs()[words >> np.uint16(9)])
    return Read(codes, _fields(blocks[:, 66:74], 4, NIBBLES), _half(blocks))


def _iq2_s(blocks: Bytes) -> Read:
    indices = _joined(blocks[:, 2:34], _fields(blocks[:, 66:74], 2, (0, 2, 4, 6)))
    return Read(_codes("iq2_s", indices, _signs()[blocks[:, 34:66]]), _fields(blocks[:, 74:82], 4, NIBBLES), _half(blocks))


def _iq3_xxs(blocks: Bytes) -> Read:
    words = _words(blocks, 66, 8, "<u4")
    codes = _codes("iq3_xxs", blocks[:, 2:66], _even_signs()[_fields(words, 7, SEVENS)])
    return Read(codes, words >> np.uint32(28), _half(blocks))


def _iq3_s(blocks: Bytes) -> Read:
    indices = _joined(blocks[:, 2:66], _fields(blocks[:, 66:74], 1, range(8)))
    return Read(_codes("iq3_s", indices, _signs()[blocks[:, 74:106]]), _fields(blocks[:, 106:110], 4, NIBBLES), _half(blocks))


CODED_BLOCKS: Mapping[str, CodedBlocks] = {
    format.name: format
    for format in (
        CodedBlocks("tq1_0", 54, _tq1_0, Kind.TERNARY),
        CodedBlocks("iq1_s", 50, _iq1_s, Kind.IQ1, 32, 1 / 8),
        CodedBlocks("iq1_m", 56, _iq1_m, Kind.IQ1, 16, 1 / 8),
        CodedBlocks("iq2_xxs", 66, _iq2_xxs, Kind.IQ2, 32, 1 / 8),
        CodedBlocks("iq2_xs", 74, _iq2_xs, Kind.IQ2, 16, 1 / 8),
        CodedBlocks("iq2_s", 82, _iq2_s, Kind.IQ2, 16, 1 / 8),
        CodedBlocks("iq3_xxs", 98, _iq3_xxs, Kind.IQ3_XXS, 32, 1 / 4),
        CodedBlocks("iq3_s", 110, _iq3_s, Kind.IQ3_S, 32),
    )
}
