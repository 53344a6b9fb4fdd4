"""Cohere (Command R, Aya): attention and MLP in parallel, layer norms without bias, and a RoPE that rotates adjacent dimensions as
pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compiler.frontend.config import ModelConfig, Norm, read_decoder, rotating_neighbours, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import gated_mlp, layer_norm_attention, parallel
from compiler.frontend.rope import read_rope


def read(fields: Fields) -> ModelConfig:
    config = replace(read_cohere(fields), head_norms=fields.flag("use_qk_norm", False))  # true in Command R+
    # Command R states a max_position_embeddings of 8192, but the model was trained on longer texts, up to model_max_length.
    config = replace(config, max_context=fields.integer("model_max_length", config.max_context))
    return rotating_neighbours(replace(config, rope=read_rope(fields, config.head_dim, theta=500_000.0)))


def read_cohere(fields: Fields) -> ModelConfig:
    """Read the fields that Cohere and Cohere 2 have in common."""
    fields.fill(tie_word_embeddings=True, max_position_embeddings=8192)
    config = rotating_whole_heads(rotating_neighbours(read_decoder(fields, eps=1e-5, eps_field="layer_norm_eps", bias="attention_bias")))
    return replace(
        config,
        norm=Norm.LAYER_WITHOUT_BIAS,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


GGUF_FIELDS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
layer = parallel(partial(layer_norm_attention, norms=("self_attn.q_norm", "self_attn.k_norm")), gated_mlp)
FAMILY = DecoderFamily(("cohere",), read, layer, gguf=Gguf("command-r", GGUF_FIELDS, query_norm="use_qk_norm"))
