"""ERNIE 4.5: Llama whose RoPE rotates adjacent dimensions as pairs. One field of the configuration, `use_bias`, switches all biases."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_neighbours, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(rope_theta=500_000.0, tie_word_embeddings=True, num_key_value_heads=2, max_position_embeddings=131_072)
    config = rotating_neighbours(rotating_whole_heads(read_decoder(fields, eps=1e-5, default_head_dim=128)))
    bias = fields.flag("use_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


FAMILY = DecoderFamily(("ernie4_5",), read, llama.layer, gguf=Gguf("ernie4_5", biases={"use_bias": "attn_output"}))
