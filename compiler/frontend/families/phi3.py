"""Phi-3: Llama whose projections are stored stacked."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_windows
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attention, gated_mlp, pre_norm
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    windows = read_windows(fields, fields.integer("sliding_window", None), lambda _: True)
    return replace(read_decoder(fields, eps=1e-5), windows=windows)


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(at, x, partial(attention, names=("self_attn.qkv_proj",)), partial(gated_mlp, names=("mlp.gate_up_proj",)))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """GGUF counts the dimensions that rotate; config.json has their share."""
    rotated, hidden_size, num_heads = metadata.get("rope.dimension_count"), config.get("hidden_size"), config.get("num_attention_heads")
    if type(rotated) is int and type(hidden_size) is int and type(num_heads) is int and hidden_size > 0:
        config["partial_rotary_factor"] = rotated * num_heads / hidden_size


FAMILY = DecoderFamily(
    ("phi3",),
    read,
    layer,
    gguf=Gguf(
        "phi3",
        {"attention.sliding_window": "sliding_window"},
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        complete=complete,
    ),
)
