"""Llama-shaped models with random weights, made on the spot: for measuring speed, where values do not matter."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import Activation, ModelConfig
from compiler.frontend.rope import Rope
from compiler.ir.dtypes import DType

# name: (hidden, layers, heads, kv heads, head size, ffn, vocabulary)
SHAPES = {
    "0.5b": (1024, 24, 16, 4, 64, 5632, 32000),
    "1.5b": (1536, 28, 12, 2, 128, 8960, 151936),
    "8b-shape": (4096, 32, 32, 8, 128, 14336, 128256),
}


def synthetic_config(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise ValueError(f"--synthetic is {name!r}; expected one of {', '.join(SHAPES)}")
    hidden, layers, heads, kv_heads, size, ffn, vocab = SHAPES[name]
    return ModelConfig(
        "llama",
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        size,
        Activation.SILU,
        1e-5,
        8192,
        size**-0.5,
        (None,) * layers,
        Rope(1e4, size),
    )


class UniformDTypes(dict[str, DType]):
    """Every tensor of the checkpoint has this element type."""

    def get(self, name: str, default: DType | None = None) -> DType:  # type: ignore[override]  # never absent
        return DType.BF16


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Arrays on demand; the same name gives the same values."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> NDArray[Any]:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        shape = self.shapes[name]
        if len(shape) == 1:
            return np.ones(shape, DType.BF16.numpy)
        scale = shape[-1] ** -0.5
        block = rng.standard_normal((min(shape[0], 256), shape[1]), np.float32) * scale  # repeated: drawing a billion numbers takes minutes
        return np.resize(block.astype(DType.BF16.numpy), shape)
