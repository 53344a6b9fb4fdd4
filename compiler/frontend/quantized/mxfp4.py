"""MXFP4: floats of 4 bits (e2m1), two per byte, with a power of two as the scale of each 32 inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import Form
from compiler.frontend.quantized.method import Array, Floats, Infos, Layout, Method, Parts

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # the values of e2m1
# PAIRS has both values of each byte, first the value of the lower four bits.
PAIRS = np.stack([np.tile(NUMBERS, 16), np.repeat(NUMBERS, 16)], -1).view(np.uint64)
POWERS = np.ldexp(np.float32(1), np.arange(255) - 127)  # value of each scale byte; byte 255 stands for NaN
BYTES = 16  # bytes per block


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Stacked matrices [experts, out, blocks, 16]."""

    @property
    def layout(self) -> Layout:
        return Layout("_blocks", ("_scales",))

    def shape(self, infos: Infos) -> tuple[int, ...]:
        blocks, scales = infos["_blocks"], infos["_scales"]
        if len(blocks.shape) != 4 or blocks.shape[3] != BYTES or blocks.dtype != np.uint8:
            raise DamagedFile(f"its blocks are {blocks.dtype.name} {list(blocks.shape)}, expected uint8 [experts, out, blocks, {BYTES}]")
        if scales.shape != blocks.shape[:3] or scales.dtype != np.uint8:
            raise DamagedFile(f"its scales are {scales.dtype.name} {list(scales.shape)}, expected uint8 {list(blocks.shape[:3])}")
        experts, outputs, count, _ = blocks.shape
        return experts, outputs, count * 2 * BYTES

    def values(self, parts: Parts) -> Floats:
        blocks, scales = parts["_blocks"], parts["_scales"]
        experts, outputs, count, _ = blocks.shape
        if scales.size and scales.max() == len(POWERS):
            raise DamagedFile(f"its scales hold {len(POWERS)}, which stands for NaN; expected at most {len(POWERS) - 1}")
        values = np.empty((experts, outputs, count, 2 * BYTES), np.float32)
        for expert in range(experts):  # one at a time, so that intermediate arrays stay small
            numbers = PAIRS.take(blocks[expert]).view(np.float32)
            np.multiply(numbers, POWERS[scales[expert, ..., None]], out=values[expert])
        return values.reshape(experts, outputs, -1)

    def form(self, infos: Infos, read: Callable[[str], Array]) -> Form | None:
        """Return None: a program stores the matrix as 16-bit floats, which are exact. No form describes the layout of stacked experts."""
        return None

    def held(self, parts: Parts) -> Parts:
        raise AssertionError(self)


def read_mxfp4(fields: Fields) -> Method:
    fields.skip("modules_to_not_convert")
    return Mxfp4()
