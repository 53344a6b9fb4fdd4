"""MXFP4: floats of 4 bits (e2m1), two per byte, with a power of two as the scale of each 32 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import NUMBERS, SCALE, Form
from compiler.frontend.quantized.method import Array, Floats, Infos, Layout, Method, Parts, Read
from compiler.ir.dtypes import DType
from compiler.ir.numbers import DOUBLED_E2M1, Kind

# the doubles of both values of each byte: first that of the lower four bits
PAIRS = np.stack([np.tile(DOUBLED_E2M1, 16), np.repeat(DOUBLED_E2M1, 16)], -1).astype(np.float32).view(np.uint64)
POWERS = np.ldexp(np.float32(1), np.arange(255) - 128)  # half the value of each scale byte; byte 255 stands for NaN
BYTES = 16  # bytes per block


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The method MXFP4: stacked matrices [experts, out, blocks, 16 bytes]."""

    @property
    def layout(self) -> Layout:
        return Layout("_blocks", ("_scales",))

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        blocks, scales = infos["_blocks"], infos["_scales"]
        if len(blocks.shape) != 4 or blocks.shape[3] != BYTES or blocks.dtype != np.uint8:
            raise DamagedFile(f"its blocks are {blocks.dtype.name} {list(blocks.shape)}, expected uint8 [experts, out, blocks, {BYTES}]")
        if scales.shape != blocks.shape[:3] or scales.dtype != np.uint8:
            raise DamagedFile(f"its scales are {scales.dtype.name} {list(scales.shape)}, expected uint8 {list(blocks.shape[:3])}")
        experts, outputs, count, _ = blocks.shape
        return experts, outputs, count * 2 * BYTES

    def values(self, parts: Parts) -> Floats:
        blocks, powers = parts["_blocks"], self.powers(parts)
        experts, outputs, count, _ = blocks.shape
        values = np.empty((experts, outputs, count, 2 * BYTES), np.float32)
        for expert in range(experts):  # one expert at a time, so that intermediate arrays stay small
            numbers = PAIRS.take(blocks[expert]).view(np.float32)
            np.multiply(numbers, powers[expert, ..., None], out=values[expert])
        return values.reshape(experts, outputs, -1)

    def form(self, infos: Infos, read: Read) -> Form | None:
        return Form(4, 2 * BYTES, DType.BF16, kind=Kind.E2M1)

    def held(self, parts: Parts) -> Parts:
        blocks, powers = parts["_blocks"], self.powers(parts)
        return {NUMBERS[Kind.E2M1]: blocks.reshape(*blocks.shape[:2], -1), SCALE: powers.astype(DType.BF16.numpy)}

    def powers(self, parts: Parts) -> Floats:
        """Return half the scale of each block of 32 numbers, since these scales multiply the doubles of the numbers (`DOUBLED_E2M1`)."""
        return powers_of(parts["_scales"])


def powers_of(scales: Array) -> Floats:
    """Return half the power of two for which each byte stands. Raise DamagedFile if a byte stands for NaN."""
    if scales.size and scales.max() == len(POWERS):
        raise DamagedFile(f"its scales hold {len(POWERS)}, which stands for NaN; expected at most {len(POWERS) - 1}")
    return POWERS[scales]


def read_mxfp4(fields: Fields) -> tuple[Method, ...]:
    fields.skip("modules_to_not_convert")
    return (Mxfp4(),)
