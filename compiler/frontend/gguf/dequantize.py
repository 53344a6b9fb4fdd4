"""The block formats of GGUF, decoded to floats.

A row is a sequence of blocks. A block holds quantised values, their scales, and in some formats minima. Each format's function takes the
bytes of many blocks, [n, bytes per block], and returns integers, scales and shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.quantized.held import UNIT, Form, Offset, halves
from compiler.ir.dtypes import DType
from compiler.ir.numbers import TABLES, Kind

Bytes = NDArray[np.uint8]
Integers = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]


class Levels(NamedTuple):
    """The scales or shifts of groups, each an integer times the float `unit` of its block. The products are exact in f32."""

    numbers: Floats  # [n, groups]
    unit: Floats  # [n, 1]

    @property
    def values(self) -> Floats:
        return self.unit * self.numbers


# Numbers [n, values per block], scales [n, groups] and shifts [n, groups]: value = number * scale - shift. A number of kind e2m1 stands for
# the double of the float that has these bits, and a number of kind iq4 is an index of its table.
Split = tuple[Integers, Floats | Levels, Floats | Levels | None]

# The number of values unpacked at a time: few enough that intermediate arrays stay in the CPU's cache.
CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Format:
    """How the values of a tensor are stored: plain numbers have a dtype, blocks have a function that unpacks them."""

    name: str
    block_values: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Bytes], Split] | None = None
    # How a program stores the values without rounding: as integers of `bits` bits. Each `group` of integers shares a scale of type `scale`.
    bits: int = 8
    group: int = 32
    scale: DType = DType.F16
    is_shifted: bool = False
    has_units: bool = False  # scales and shifts are stored as integers in units of a float per block
    kind: Kind = Kind.INT


def dequantize(blocks: Bytes, format: Format) -> Floats:
    """Decode blocks [n, block_bytes] to all their values, in order."""
    values = np.empty((len(blocks), format.block_values), np.float32)
    for start, part in _parted(blocks, format):
        numbers, scales, shifts = part[0], _values(part[1]), None if part[2] is None else _values(part[2])
        numbers = TABLES[format.kind][numbers] if format.kind in TABLES else numbers
        grouped: Floats = scales[:, :, None] * numbers.reshape(*scales.shape, -1).astype(np.float32)
        if shifts is not None:
            grouped -= shifts[:, :, None]
        values[start : start + len(numbers)] = grouped.reshape(len(numbers), -1)
    return values.reshape(-1)


def _values(scales: Floats | Levels) -> Floats:
    return scales.values if isinstance(scales, Levels) else scales


def split(blocks: Bytes, format: Format) -> dict[str, NDArray[Any]]:
    """Decode blocks to the parts that `form_of` describes, all in the order of the blocks."""
    form = form_of(format)
    assert form is not None
    found: dict[str, list[NDArray[Any]]] = {part: [] for part in form.parts}
    q, *_ = form.numbers
    middle = 8 if format.kind is Kind.INT and not format.is_shifted else 0
    for _, (numbers, *others) in _parted(blocks, format):
        found[q].append(halves(numbers + middle) if form.bits == 4 else numbers.astype(np.int8))
        for part, given in zip(form.numbers[1:], others, strict=False):
            assert given is not None, format
            if format.has_units:
                assert isinstance(given, Levels), format
                found[part].append(given.numbers.astype(np.int8))
                found[f"{part}{UNIT}"].append(given.unit)
            else:
                found[part].append(_values(given))
    return {part: np.concatenate(several) for part, several in found.items()}


def form_of(format: Format) -> Form | None:
    if format.unpack is None:
        return None
    per_unit = format.block_values // format.group if format.has_units else 0
    offset = Offset.SHIFT if format.is_shifted else Offset.NONE
    return Form(format.bits, format.group, format.scale, offset, per_unit=per_unit, kind=format.kind)


def _parted(blocks: Bytes, format: Format) -> Iterator[tuple[int, Split]]:
    assert format.unpack is not None
    step = max(1, CHUNK_VALUES // format.block_values)
    for start in range(0, len(blocks), step):
        numbers, scales, shifts = format.unpack(blocks[start : start + step])
        yield start, (numbers.reshape(len(numbers), -1), scales, shifts)


def _halves(blocks: Bytes, start: int) -> Floats:
    """Read an f16 at byte `start` of each block. Return the numbers as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Integers:
    """Unpack k bytes to 2k values: first the low four bits of all bytes, then the high four bits."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q4_0(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 2:]).astype(np.int8) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _fifth_bits(blocks: Bytes, start: int) -> Integers:
    """Return the fifth bit of each of 32 values, shifted left by 4. Bit i of the four-byte word at `start` belongs to value i."""
    return (blocks[:, start : start + 4, None] >> np.arange(8, dtype=np.uint8) & 1).reshape(len(blocks), 32) << 4


def _q5_0(blocks: Bytes) -> Split:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - 16, _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), -_halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Split:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _two_bits(packed: Bytes) -> Integers:
    """Unpack [n, 64] bytes to [n, 16, 16] values of two bits. The lowest two bits of the first 32 bytes are the first 32 values; the next
    two bits of these bytes are the next 32 values."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Bytes) -> Split:
    """Unpack sixteen groups of 16, each with a scale and a minimum of four bits in one byte."""
    scales, minima = (blocks[:, :16] & 15).astype(np.float32), (blocks[:, :16] >> 4).astype(np.float32)
    return _two_bits(blocks[:, 16:80]), Levels(scales, _halves(blocks, 80)), Levels(minima, _halves(blocks, 82))


def _q3_k(blocks: Bytes) -> Split:
    """Unpack sixteen groups of 16, each with a scale of six bits. Values have three bits; if the third is 0, 4 is subtracted."""
    packed = blocks[:, 96:108]
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    quants = _two_bits(blocks[:, 32:96]).astype(np.int8) - 4 * (1 - third.astype(np.int8))
    return quants, Levels(scales, _halves(blocks, 108)), None


def _iq4_nl(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Split:
    """Unpack eight groups of 32, each with a scale of six bits. Bytes 4-7 have the low four bits of the scales, bytes 2-3 the high two
    bits."""
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)), Levels(scales, _halves(blocks, 0)), None


def _mxfp4(blocks: Bytes) -> Split:
    """Unpack one byte, which is the exponent of a power of two, then floats of four bits. Floats are doubled, so the power is halved."""
    powers: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return _nibbles(blocks[:, 1:]), powers, None


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight scales and eight minima of six bits each from twelve bytes. The low six bits of bytes 0-3 are the first four scales;
    those of bytes 4-7 are the first four minima. For the last four scales and minima, bytes 8-11 have the low four bits, and the top two
    bits of bytes 0-7 are the high bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q45_k(blocks: Bytes, quants: Integers) -> Split:
    """Return the numbers of eight groups of 32 with a scale and a shift per group; quants are [n, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return quants, Levels(scales, _halves(blocks, 0)), Levels(minima, _halves(blocks, 2))


def _q4_k(blocks: Bytes) -> Split:
    return _q45_k(blocks, _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Split:
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of byte i is the fifth bit of value i of group g
    return _q45_k(blocks, low | high << 4)


def _q6_k(blocks: Bytes) -> Split:
    """Unpack two halves of a block, each with four groups of 32 values. The first 128 bytes have the low four bits of the values, the next
    64 bytes the high two bits. Each 16 values share a scale."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quants = (low | high << 4).reshape(-1, 16, 16).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return quants, Levels(scales, _halves(blocks, 208)), None


# Formats by the type number in the file.
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, np.dtype("<f4")),
    1: Format("F16", 1, 2, np.dtype("<f2")),
    2: Format("Q4_0", 32, 18, unpack=_q4_0, bits=4),
    3: Format("Q4_1", 32, 20, unpack=_q4_1, bits=4, is_shifted=True),
    6: Format("Q5_0", 32, 22, unpack=_q5_0),
    7: Format("Q5_1", 32, 24, unpack=_q5_1, is_shifted=True),
    8: Format("Q8_0", 32, 34, unpack=_q8_0),
    10: Format("Q2_K", 256, 84, unpack=_q2_k, bits=4, group=16, scale=DType.F32, is_shifted=True, has_units=True),
    11: Format("Q3_K", 256, 110, unpack=_q3_k, bits=4, group=16, scale=DType.F32, has_units=True),
    12: Format("Q4_K", 256, 144, unpack=_q4_k, bits=4, scale=DType.F32, is_shifted=True, has_units=True),
    13: Format("Q5_K", 256, 176, unpack=_q5_k, scale=DType.F32, is_shifted=True, has_units=True),
    14: Format("Q6_K", 256, 210, unpack=_q6_k, bits=6, group=16, scale=DType.F32, has_units=True),
    20: Format("IQ4_NL", 32, 18, unpack=_iq4_nl, bits=4, kind=Kind.IQ4),
    23: Format("IQ4_XS", 256, 136, unpack=_iq4_xs, bits=4, scale=DType.F32, kind=Kind.IQ4, has_units=True),
    30: Format("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    39: Format("MXFP4", 32, 17, unpack=_mxfp4, bits=4, scale=DType.BF16, kind=Kind.E2M1),
}
