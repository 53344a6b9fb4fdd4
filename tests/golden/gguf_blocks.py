"""Random blocks of GGUF's formats. Any bits are valid numbers and scales; only the floats of blocks must be finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.gguf.dequantize import Format

# Format -> offsets of the f16 floats in a block. All other formats have one float, at offset 0.
PAIR = (0, 2)
FLOATS = {
    "Q4_1": PAIR,
    "Q5_1": PAIR,
    "Q4_K": PAIR,
    "Q5_K": PAIR,
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
}


def random_blocks(format: Format, count: int, rng: np.random.Generator, size: float = 1.0) -> NDArray[np.uint8]:
    """Return blocks [count, bytes] whose floats have this size."""
    blocks = rng.integers(0, 256, (count, format.block_bytes), np.uint8)
    for start in FLOATS.get(format.name, (0,)):
        blocks[:, start : start + 2] = _floats(count, rng, size).view(np.uint8)
    if format.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 250  # the scale is an exponent; above 249 the powers of two overflow f32
    if format.name == "IQ1_M":  # the float is in the highest four bits of the four words of scales
        words = np.ascontiguousarray(blocks[:, 48:]).view("<u2") & np.uint16(0x0FFF)
        parts = _floats(count, rng, size).view("<u2") >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)
        blocks[:, 48:] = (words | parts << np.uint16(12)).view(np.uint8)
    return blocks


def _floats(count: int, rng: np.random.Generator, size: float) -> NDArray[np.float16]:
    return (rng.standard_normal((count, 1)) * size).astype("<f2")
