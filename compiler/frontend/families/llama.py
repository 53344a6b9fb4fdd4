"""Llama 1 to 3.x: a norm before attention, a norm before the gated MLP."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, pre_norm


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = rotating_whole_heads(read_decoder(fields))
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


layer = pre_norm(attention, gated_mlp)
GGUF = Gguf("llama", biases={"attention_bias": "attn_output", "mlp_bias": "ffn_down"}, pairs_interleaved=True)
FAMILY = DecoderFamily(("llama",), read, layer, divides=True, gguf=GGUF)
