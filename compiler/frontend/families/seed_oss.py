"""Seed-OSS: Llama with biases on queries, keys and values, and an optional bias on the output projection of attention."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(attention_bias=True, head_dim=128, num_key_value_heads=8, max_position_embeddings=524_288)
    return replace(llama.read(fields), output_bias=fields.flag("attention_out_bias", False))


GGUF = Gguf(
    "seed_oss",
    layer_names={"post_attention_norm": "post_attention_layernorm"},
    biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_down"},
)
FAMILY = DecoderFamily(("seed_oss",), read, llama.layer, gguf=GGUF)
