"""Qwen3.5 and 3.6: the gated delta rule in three of four layers, gated attention in every fourth. Images are not read."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families.qwen3_next import mixed_layer, read_hybrid
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, gated_mlp
from compiler.frontend.layers.delta import gated_delta
from compiler.frontend.layers.states import GATE_FORMAT
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    fields = text_of(fields, "qwen3_5_text")
    fields.fill(intermediate_size=12288, num_key_value_heads=4)
    return read_hybrid(fields)


def text_of(fields: Fields, model_type: str) -> Fields:
    return text_fields(fields, {"model_type": model_type}) if "text_config" in fields else fields


def layer(at: Layer, x: Var) -> Var:
    return mixed_layer(at, x, delta, gated_mlp)


def delta(at: Layer, h: Var) -> Var:
    net, size, r = at.step.net, at.step.config.hidden_size, at.step.config.recurrence
    assert r is not None, at.step.config
    names = at.name("linear_attn.in_proj_qkv"), at.name("linear_attn.in_proj_z")
    wide = net.linear(h, names, size, [r.channels, r.values])
    b, a = (net.linear(h, at.name(f"linear_attn.in_proj_{gate}"), size, r.num_heads, format=GATE_FORMAT) for gate in "ba")
    return gated_delta(at, net.slice(wide, 1, 0, r.channels), net.slice(wide, 1, r.channels, r.channels + r.values), b, a)


FAMILY = DecoderFamily(("qwen3_5", "qwen3_5_text"), read, layer)
