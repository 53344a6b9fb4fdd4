"""Nemotron and Minitron: layer norms that multiply by 1 + weight, an MLP without a gate, and a RoPE that rotates part of each head."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, Norm, read_decoder
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, mlp, pre_norm


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.5, hidden_act="relu2", max_position_embeddings=4096)
    fields.skip("rope_percent", "kv_channels")  # names of partial_rotary_factor and head_dim in the training code
    config = read_decoder(fields, eps=1e-5, eps_field="norm_eps", bias="attention_bias")
    return replace(config, norm=Norm.LAYER, norm_offset=1.0, mlp_bias=fields.flag("mlp_bias", False))


layer = pre_norm(attention, mlp)
GGUF = Gguf(
    "nemotron",
    fields={"attention.layer_norm_epsilon": "norm_eps", "attention.layer_norm_rms_epsilon": "norm_eps"},  # converters write both keys
    biases={"attention_bias": "attn_output", "mlp_bias": "ffn_down"},
    norm_offset=1.0,
)
FAMILY = DecoderFamily(("nemotron",), read, layer, gguf=GGUF)
