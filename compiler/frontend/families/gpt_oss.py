"""gpt-oss: a mixture of experts with clipped gates in every layer, attention sinks, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ClippedGate, ExpertNames, read_mixture

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = ExpertNames(
    "mlp.router",
    "mlp.experts.gate_proj",
    "mlp.experts.up_proj",
    "mlp.experts.down_proj",
    stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


def read(fields: Fields) -> ModelConfig:
    fields.fill(num_local_experts=128, num_experts_per_tok=4, intermediate_size=2880, rope_theta=150_000.0)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        fields.fill(rope_scaling=YARN)
    fields.skip("initial_context_length", "experts_per_token")  # fields of the first release, which repeat other fields
    bias = fields.flag("attention_bias", True)
    clipped = ClippedGate(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 128)
    found = read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True)
    return replace(
        rotating_whole_heads(read_decoder(fields, eps=1e-5, default_head_dim=64)),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=read_windows(fields, window, lambda layer: layer % 2 == 0),
        mixture=replace(found, bias=True, clipped=clipped),
    )


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    if isinstance(scaling := config.get("rope_scaling"), dict):
        config["rope_scaling"] = {**scaling, "truncate": False}  # the metadata does not state this field


GGUF = Gguf(
    "gpt-oss",
    {
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
    },
    {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"},
    complete=complete,
)
FAMILY = DecoderFamily(("gpt_oss",), read, pre_norm(attention, mixture(NAMES)), gguf=GGUF, experts=NAMES)
