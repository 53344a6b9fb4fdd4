"""Phi-3: Llama that stores queries, keys and values as one projection, and gate and up as another. Windows are optional, and RoPE may
rotate part of each head."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_one_window
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, pre_norm
from compiler.frontend.rope import rope_fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=4096, original_max_position_embeddings=4096)
    # In this family, ORIGINAL outside the fields of the rope overrides the field of this name inside them.
    rope_fields(fields, {ORIGINAL: fields.integer(ORIGINAL)})
    return replace(read_decoder(fields, eps=1e-5), windows=read_one_window(fields))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Copy `original_max_position_embeddings` from `rope_scaling` to the fields outside it, where `read` reads it."""
    config[ORIGINAL] = (config["rope_scaling"] or {}).get(ORIGINAL)


ORIGINAL = "original_max_position_embeddings"
GGUF = Gguf(
    "phi3",
    {"attention.sliding_window": "sliding_window"},
    {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    complete=complete,
)
FAMILY = DecoderFamily(
    ("phi3",), read, pre_norm(partial(attention, names=("self_attn.qkv_proj",)), partial(gated_mlp, names=("mlp.gate_up_proj",))), gguf=GGUF
)
