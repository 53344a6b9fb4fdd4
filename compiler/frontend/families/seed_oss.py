"""Seed-OSS: Llama with biases on queries, keys and values, and a switch for the bias behind attention."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(attention_bias=True, head_dim=128, num_key_value_heads=8)
    return replace(llama.read(fields), output_bias=fields.flag("attention_out_bias", False))


FAMILY = DecoderFamily(("seed_oss",), read, llama.layer)
