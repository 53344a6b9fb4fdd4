"""Helium: Llama whose RoPE rotates adjacent dimensions as pairs."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, rotating_neighbours
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(rope_theta=100_000.0, rms_norm_eps=1e-8, head_dim=128, max_position_embeddings=4096)
    return rotating_neighbours(llama.read(fields))


FAMILY = DecoderFamily(("helium",), read, llama.layer)
