"""The block formats of GGUF, back to floats.

A row is a sequence of blocks; a block holds quantized values, their scales, and at times minima. A function here takes the bytes of
many blocks, [n, bytes of a block], and gives integers, scales and shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.quantized.held import Form, Offset, halves
from compiler.ir.dtypes import DType

Bytes = NDArray[np.uint8]
Integers = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]

UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # of IQ4_NL and IQ4_XS
DOUBLED_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the numbers of e2m1

# Numbers [n, values of a block], scales [n, groups] and shifts: a value is its number times the scale, less the shift.
Split = tuple[Integers, Floats, Floats | None]

CHUNK_VALUES = 1 << 20  # unpacked at a time: intermediate arrays stay in the cache, and far below the size of a tensor


@dataclass(frozen=True, slots=True)
class Format:
    """How values of a tensor are stored: plain numbers have a dtype, blocks have a function."""

    name: str
    block_values: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Bytes], Split] | None = None
    # As a program holds them without rounding: numbers of 4 or 8 bits, of which so many share a scale of that type.
    bits: int = 8
    group: int = 32
    scale: DType = DType.F16
    is_shifted: bool = False


def dequantize(blocks: Bytes, format: Format) -> Floats:
    """All values of [n, block_bytes], in order."""
    values = np.empty((len(blocks), format.block_values), np.float32)
    for start, part in _parted(blocks, format):
        numbers, scales, shifts = part
        grouped: Floats = scales[:, :, None] * numbers.reshape(*scales.shape, -1).astype(np.float32)
        if shifts is not None:
            grouped -= shifts[:, :, None]
        values[start : start + len(numbers)] = grouped.reshape(len(numbers), -1)
    return values.reshape(-1)


def split(blocks: Bytes, format: Format) -> tuple[Bytes | NDArray[np.int8], Floats, Floats | None]:
    """The same as integers, as `form_of` describes them, with their scales and shifts, all in order."""
    form = form_of(format)
    assert form is not None
    numbers: list[NDArray[Any]] = []
    scales: list[Floats] = []
    shifts: list[Floats] = []
    middle = 0 if format.is_shifted else 8
    for _, (found, scale, shift) in _parted(blocks, format):
        numbers.append(halves(found + middle) if form.bits == 4 else found.astype(np.int8))
        scales.append(scale)
        shifts.extend([] if shift is None else [shift])
    return np.concatenate(numbers), np.concatenate(scales), np.concatenate(shifts) if shifts else None


def form_of(format: Format) -> Form | None:
    if format.unpack is None:
        return None
    return Form(format.bits, format.group, format.scale, Offset.SHIFT if format.is_shifted else Offset.NONE)


def _parted(blocks: Bytes, format: Format) -> Iterator[tuple[int, Split]]:
    assert format.unpack is not None
    step = max(1, CHUNK_VALUES // format.block_values)
    for start in range(0, len(blocks), step):
        numbers, scales, shifts = format.unpack(blocks[start : start + step])
        yield start, (numbers.reshape(len(numbers), -1), scales, shifts)


def _halves(blocks: Bytes, start: int) -> Floats:
    """An f16 of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Integers:
    """[..., k] bytes to [..., 2k] values: the low halves of all of them, then the high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q4_0(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 2:]).astype(np.int8) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _fifth_bits(blocks: Bytes, start: int) -> Integers:
    """The fifth bit of each of 32 values, from four bytes: bit i of the word belongs to value i."""
    return (blocks[:, start : start + 4, None] >> np.arange(8, dtype=np.uint8) & 1).reshape(len(blocks), 32) << 4


def _q5_0(blocks: Bytes) -> Split:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - 16, _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), -_halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Split:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _two_bits(packed: Bytes) -> Integers:
    """[n, 64] bytes to [n, 16, 16] values: the lowest two bits of 32 bytes are 32 values, the next two bits the next 32."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Bytes) -> Split:
    """Sixteen groups of 16, each with a scale and a minimum of four bits in one byte."""
    scales, minima = (blocks[:, :16] & 15).astype(np.float32), (blocks[:, :16] >> 4).astype(np.float32)
    factors: Floats = _halves(blocks, 80) * scales
    shifts: Floats = _halves(blocks, 82) * minima
    return _two_bits(blocks[:, 16:80]), factors, shifts


def _q3_k(blocks: Bytes) -> Split:
    """Sixteen groups of 16, each with a scale of six bits. A third bit that is not set takes 4 from the value."""
    packed = blocks[:, 96:108]
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    quants = _two_bits(blocks[:, 32:96]).astype(np.int8) - 4 * (1 - third.astype(np.int8))
    factors: Floats = _halves(blocks, 108) * scales
    return quants, factors, None


def _iq4_nl(blocks: Bytes) -> Split:
    return UNEVEN[_nibbles(blocks[:, 2:])], _halves(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Split:
    """Eight groups of 32, each with a scale of six bits: the low four from bytes 4-7, the high two from bytes 2-3."""
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    values = UNEVEN[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return values, _halves(blocks, 0) * scales, None


def _mxfp4(blocks: Bytes) -> Split:
    """A power of two in a byte, then numbers of four bits. The table holds their doubles, so the power is halved."""
    powers: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return DOUBLED_FP4[_nibbles(blocks[:, 1:])], powers, None


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of six bits each in twelve bytes. The first four of both are the low six bits of bytes 0-3 and
    4-7; of the others, bytes 8-11 hold the low four bits, and the top two bits of bytes 0-3 and 4-7 the rest."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q45_k(blocks: Bytes, quants: Integers) -> Split:
    """Eight groups of 32, each with a scale and a minimum; quants are [n, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    factors: Floats = _halves(blocks, 0) * scales
    shifts: Floats = _halves(blocks, 2) * minima
    return quants, factors, shifts


def _q4_k(blocks: Bytes) -> Split:
    return _q45_k(blocks, _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Split:
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of byte i is the fifth of value i of group g
    return _q45_k(blocks, low | high << 4)


def _q6_k(blocks: Bytes) -> Split:
    """Two halves of four groups of 32: four low bits from 64 bytes, two high bits from 32. A scale per 16 values."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quants = (low | high << 4).reshape(-1, 16, 16).astype(np.int8) - 32
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return quants, scales, None


# By the number that a file has for them.
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, np.dtype("<f4")),
    1: Format("F16", 1, 2, np.dtype("<f2")),
    2: Format("Q4_0", 32, 18, unpack=_q4_0, bits=4),
    3: Format("Q4_1", 32, 20, unpack=_q4_1, bits=4, is_shifted=True),
    6: Format("Q5_0", 32, 22, unpack=_q5_0),
    7: Format("Q5_1", 32, 24, unpack=_q5_1, is_shifted=True),
    8: Format("Q8_0", 32, 34, unpack=_q8_0),
    10: Format("Q2_K", 256, 84, unpack=_q2_k, bits=4, group=16, scale=DType.F32, is_shifted=True),
    11: Format("Q3_K", 256, 110, unpack=_q3_k, bits=4, group=16, scale=DType.F32),
    12: Format("Q4_K", 256, 144, unpack=_q4_k, bits=4, scale=DType.F32, is_shifted=True),
    13: Format("Q5_K", 256, 176, unpack=_q5_k, scale=DType.F32, is_shifted=True),
    14: Format("Q6_K", 256, 210, unpack=_q6_k, group=16, scale=DType.F32),
    20: Format("IQ4_NL", 32, 18, unpack=_iq4_nl),
    23: Format("IQ4_XS", 256, 136, unpack=_iq4_xs, scale=DType.F32),
    30: Format("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    39: Format("MXFP4", 32, 17, unpack=_mxfp4, scale=DType.F32),
}
