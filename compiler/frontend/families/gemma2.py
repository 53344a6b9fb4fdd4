"""Gemma 2: a norm before and after attention and the MLP, soft caps, a window in every other layer, and scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_softcap, read_windows, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, sandwiched

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GGUF_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=8192)
    window = fields.integer("sliding_window", 4096)
    fields.require_equal("sliding_window_size", window, "sliding_window")  # larger models have this field; transformers ignores it
    return replace(
        read_gemma(fields),
        windows=read_windows(fields, window, lambda layer: layer % 2 == 0),
        attention_softcap=read_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma(fields: Fields) -> ModelConfig:
    """Read the fields that Gemma 2 and Gemma 3 have in common."""
    fields.skip("hidden_act")  # transformers reads hidden_activation instead
    fields.fill(hidden_activation="gelu_pytorch_tanh")
    config = rotating_whole_heads(read_decoder(fields, default_head_dim=256, act="hidden_activation", bias="attention_bias"))
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )


def completed_by(largest: int) -> Callable[[dict[str, Any], Mapping[str, Any], Container[str]], None]:
    """Return a `Gguf.complete` that adds the activation, and `query_pre_attn_scalar`, from which the attention scale is computed: GGUF
    metadata lacks both. In the family's largest model, which has `largest` layers, `query_pre_attn_scalar` is hidden_size / num_heads,
    rounded down. In all other models, `query_pre_attn_scalar` is head_dim, or stays absent if there is no head_dim."""

    def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
        config["hidden_activation"] = "gelu_pytorch_tanh"
        hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
        if config.get("num_hidden_layers") == largest and type(hidden_size) is int and type(num_heads) is int and num_heads:
            config["query_pre_attn_scalar"] = hidden_size // num_heads
        elif "head_dim" in config:
            config["query_pre_attn_scalar"] = config["head_dim"]

    return complete


FAMILY = DecoderFamily(
    ("gemma2",),
    read,
    sandwiched(attention, gated_mlp, NORMS),
    divides=True,
    gguf=Gguf("gemma2", GGUF_FIELDS, GGUF_LAYER_NAMES, norm_offset=1.0, complete=completed_by(largest=46)),
)
