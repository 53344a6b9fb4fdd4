"""Qwen3: Llama with a norm of each query head and each key head."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.families.qwen2 import read_qwen_windows
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import gated_mlp, head_norm_attention, pre_norm


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=32_768)
    config = rotating_whole_heads(read_decoder(fields, default_head_dim=128, bias="attention_bias"))
    return replace(config, windows=read_qwen_windows(fields))


layer = pre_norm(head_norm_attention, gated_mlp)
FAMILY = DecoderFamily(("qwen3",), read, layer, divides=True, gguf=Gguf("qwen3"))
