"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with mixtures of experts, each with a gated shared expert; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import qwen2, qwen3_next
from compiler.frontend.families.qwen3_moe import read_dense
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames

NAMES: ExpertNames = qwen3_next.NAMES


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=5632, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    fields.fill(shared_expert_intermediate_size=5632)
    fields.require("as in all models", use_sliding_window=False)
    config = replace(qwen2.read(fields), qkv_bias=fields.flag("qkv_bias", True))
    return replace(config, mixture=replace(qwen3_next.read_experts(fields), dense_layers=read_dense(fields)))


FAMILY = DecoderFamily(("qwen2_moe",), read, pre_norm(attention, mixture(NAMES)), experts=NAMES)
