"""The formats of GGUF tensors: plain numbers, or blocks (compiler/ir/blocks.py, compiler/ir/coded_blocks.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compiler.ir.blocks import BLOCKS, NUMBERS, Blocks, Bytes, unpacked
from compiler.ir.coded_blocks import CODED_BLOCKS, CodedBlocks
from compiler.ir.numbers import TABLES

Floats = NDArray[np.float32]

# The number of values that are unpacked at a time, so few that intermediate arrays stay in the CPU's cache.
CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Format:
    """How the values of a tensor are stored: plain numbers have a dtype, quantised values have blocks."""

    name: str
    block_values: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None
    blocks: Blocks | CodedBlocks | None = None


def dequantize(blocks: Bytes, format: Blocks | CodedBlocks) -> Floats:
    """Decode blocks [n, num_bytes] to all their values, in order."""
    if isinstance(format, CodedBlocks):
        return format.values(blocks)
    values = np.empty((len(blocks), format.num_values), np.float32)
    step = max(1, CHUNK_VALUES // format.num_values)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        scales, numbers = _levels(part, format, "scale"), _numbers(part, format)
        grouped: Floats = scales[:, :, None] * numbers.reshape(*scales.shape, -1).astype(np.float32)
        if format.shift is not None:
            grouped -= _levels(part, format, "shift")[:, :, None]
        values[start : start + len(part)] = grouped.reshape(len(part), -1)
    return values.reshape(-1)


def _numbers(blocks: Bytes, format: Blocks) -> NDArray[Any]:
    """Return the numbers that the scales of blocks multiply, [blocks, values]. Codes are replaced by the numbers for which they stand."""
    numbers = unpacked(blocks, format, NUMBERS)
    if format.bits == 4:
        halves = np.stack([numbers & 15, numbers >> 4], -1).reshape(len(blocks), -1)
        numbers = TABLES[format.kind][halves] if format.kind in TABLES else halves.astype(np.int8) - np.int8(format.middle)
    return numbers


def _levels(blocks: Bytes, format: Blocks, name: str) -> Floats:
    """Return the scales or the shifts of groups (`name` is `scale` or `shift`) as floats, [blocks, groups]."""
    levels = unpacked(blocks, format, name).astype(np.float32)
    return unpacked(blocks, format, f"{name}_unit") * levels if format.has_units else levels


def _of_blocks(name: str) -> Format:
    blocks = {**BLOCKS, **CODED_BLOCKS}[name]
    return Format(name.upper(), blocks.num_values, blocks.num_bytes, blocks=blocks)


# Formats by the type number in the file.
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, np.dtype("<f4")),
    1: Format("F16", 1, 2, np.dtype("<f2")),
    2: _of_blocks("q4_0"),
    3: _of_blocks("q4_1"),
    6: _of_blocks("q5_0"),
    7: _of_blocks("q5_1"),
    8: _of_blocks("q8_0"),
    10: _of_blocks("q2_k"),
    11: _of_blocks("q3_k"),
    12: _of_blocks("q4_k"),
    13: _of_blocks("q5_k"),
    14: _of_blocks("q6_k"),
    16: _of_blocks("iq2_xxs"),
    17: _of_blocks("iq2_xs"),
    18: _of_blocks("iq3_xxs"),
    19: _of_blocks("iq1_s"),
    20: _of_blocks("iq4_nl"),
    21: _of_blocks("iq3_s"),
    22: _of_blocks("iq2_s"),
    23: _of_blocks("iq4_xs"),
    29: _of_blocks("iq1_m"),
    30: Format("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    34: _of_blocks("tq1_0"),
    35: _of_blocks("tq2_0"),
    39: _of_blocks("mxfp4"),
}
