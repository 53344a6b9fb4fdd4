"""InternLM 3: Llama with other names of fields. GGUF files name the architecture llama, and are read as files of Llama."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(rms_norm_eps=1e-5, head_dim=128, num_key_value_heads=2, max_position_embeddings=32768)
    config = rotating_whole_heads(read_decoder(fields))
    # In newer files, `attention_bias` switches the biases of all projections of attention, and `mlp_bias` those of the MLP.
    # In older files, `qkv_bias` switches the biases of queries, keys and values, and `bias` those of the output projection and of the MLP.
    bias, qkv_bias = fields.flag("bias", False), fields.flag("attention_bias", fields.flag("qkv_bias", False))
    return replace(config, qkv_bias=qkv_bias, output_bias=fields.flag("attention_bias", bias), mlp_bias=fields.flag("mlp_bias", bias))


FAMILY = DecoderFamily(("internlm3",), read, llama.layer)
