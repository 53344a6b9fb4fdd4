"""Apertus: Llama with a norm per head, and an MLP without a gate whose activation has learned parameters (xIELU)."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, head_norm_attention, mlp, pre_norm
from compiler.ir.graph.atoms import Var

ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(fields: Fields) -> ModelConfig:
    fields.fill(hidden_act="xielu", max_position_embeddings=65_536)
    if "rope_parameters" not in fields:
        fields.fill(rope_theta=12e6, rope_scaling=ROPE)
    for name, value in (("qk_norm", True), ("post_norm", False)):
        if fields.flag(name, value) is not value:
            raise fields.error(name, f"{value}".lower())
    bias = fields.flag("attention_bias", False)
    return replace(rotating_whole_heads(read_decoder(fields, eps=1e-5)), qkv_bias=bias, output_bias=bias)


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(at, x, head_norm_attention, mlp)


RENAMED = {".attention_layernorm.": ".input_layernorm.", ".feedforward_layernorm.": ".post_attention_layernorm."}
FAMILY = DecoderFamily(("apertus",), read, layer, renamed=RENAMED)
