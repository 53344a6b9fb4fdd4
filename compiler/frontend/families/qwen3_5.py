"""Qwen3.5 and 3.6: the gated delta rule in three of four layers, gated attention in every fourth layer. The encoder of images is not
supported."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families.qwen3_next import GGUF_FIELDS, GGUF_LAYER_NAMES, GGUF_RESTORED, mixed, read_hybrid
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import inner_size
from compiler.frontend.layers.decoder import Layer, gated_mlp, pre_norm
from compiler.frontend.layers.delta import gated_delta
from compiler.frontend.layers.states import GATE_FORMAT
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    fields = text_of(fields, "qwen3_5_text")
    fields.fill(intermediate_size=12288, num_key_value_heads=4)
    return read_hybrid(fields)


def text_of(fields: Fields, model_type: str) -> Fields:
    """Return the fields of the decoder: those in `text_config`, or all fields if there is no such object."""
    return text_fields(fields, {"model_type": model_type}) if "text_config" in fields else fields


def delta(at: Layer, h: Var) -> Var:
    """Apply the gated delta rule. Checkpoints have one matrix for queries, keys and values, and one each for the inputs `z`, `b` and `a` of
    `gated_delta`."""
    net, size, r = at.step.net, at.step.config.hidden_size, at.step.config.recurrence
    assert r is not None, at.step.config
    names = at.name("linear_attn.in_proj_qkv"), at.name("linear_attn.in_proj_z")
    wide = net.linear(h, names, size, [r.channels, r.values])
    b, a = (net.linear(h, at.name(f"linear_attn.in_proj_{gate}"), size, r.num_heads, format=GATE_FORMAT) for gate in "ba")
    return gated_delta(at, net.slice(wide, 1, 0, r.channels), net.slice(wide, 1, r.channels, r.channels + r.values), b, a)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the size of a value head. The metadata states only the size of all value heads together."""
    if (size := inner_size(metadata, config.get("linear_num_value_heads"))) is not None:
        config["linear_value_head_dim"] = size


def adapt(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    """Record in `tiled` that converters reorder value heads: value head i reads key head i % num_keys."""
    assert config.recurrence is not None, config
    return replace(config, recurrence=replace(config.recurrence, tiled=True))


GGUF = Gguf(
    "qwen35",
    GGUF_FIELDS,
    {**GGUF_LAYER_NAMES, "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"},
    norm_offset=1.0,
    restored=GGUF_RESTORED,
    complete=complete,
    adapt=adapt,
)
FAMILY = DecoderFamily(("qwen3_5", "qwen3_5_text"), read, pre_norm(mixed(delta), gated_mlp), gguf=GGUF)
