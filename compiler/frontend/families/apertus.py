"""Apertus: Llama with a norm of each query head and each key head, and an MLP without a gate, whose activation has learned parameters
(xIELU)."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import head_norm_attention, mlp, pre_norm

ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(fields: Fields) -> ModelConfig:
    fields.fill(hidden_act="xielu", max_position_embeddings=65_536, rope_theta=12e6)
    if "rope_parameters" not in fields:
        fields.fill(rope_scaling=ROPE)
    fields.require(qk_norm=True, post_norm=False)
    return rotating_whole_heads(read_decoder(fields, eps=1e-5, bias="attention_bias"))


RENAMED = {".attention_layernorm.": ".input_layernorm.", ".feedforward_layernorm.": ".post_attention_layernorm."}
FAMILY = DecoderFamily(("apertus",), read, pre_norm(head_norm_attention, mlp), renamed=RENAMED)
