"""Phi-3: Llama that stores queries, keys and values as one projection, and gate and up as another. Windows are optional, and RoPE may
rotate part of each head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compiler.frontend.config import ModelConfig, read_decoder, read_windows
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, pre_norm


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=4096, original_max_position_embeddings=4096)
    windows = read_windows(fields, fields.integer("sliding_window", None), lambda _: True)
    return replace(read_decoder(fields, eps=1e-5), windows=windows)


GGUF = Gguf("phi3", {"attention.sliding_window": "sliding_window"}, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
FAMILY = DecoderFamily(
    ("phi3",), read, pre_norm(partial(attention, names=("self_attn.qkv_proj",)), partial(gated_mlp, names=("mlp.gate_up_proj",))), gguf=GGUF
)
