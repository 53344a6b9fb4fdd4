"""Llama 1 to 3.x: a norm before attention, and a norm before the gated MLP."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, pre_norm


def read(fields: Fields) -> ModelConfig:
    config = rotating_whole_heads(read_decoder(fields, bias="attention_bias"))
    return replace(config, mlp_bias=fields.flag("mlp_bias", False))


layer = pre_norm(attention, gated_mlp)
GGUF = Gguf("llama", biases={"attention_bias": "attn_output", "mlp_bias": "ffn_down"}, pairs_interleaved=True)
FAMILY = DecoderFamily(("llama",), read, layer, divides=True, gguf=GGUF)
