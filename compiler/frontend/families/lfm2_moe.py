"""LFM2 with mixtures of experts in all layers except the first ones."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import lfm2
from compiler.frontend.families.lfm2 import NORMS, complete_hybrid, dense, mix, read_hybrid
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, Scoring, read_mixture

NAMES = ExpertNames(
    "feed_forward.gate",
    "feed_forward.experts.*.w1",
    "feed_forward.experts.*.w3",
    "feed_forward.experts.*.w2",
    correction="feed_forward.expert_bias",
)


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=7168, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792, norm_topk_prob=True)
    fields.require("as in all models of the family", use_expert_bias=True)
    found = replace(
        read_mixture(fields, "num_experts", "moe_intermediate_size"),
        scoring=Scoring.SIGMOID,
        scale=fields.number("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(fields.integer("num_dense_layers", 2, minimum=0))),
    )
    return replace(read_hybrid(fields), mixture=found)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    complete_hybrid(config)


GGUF = replace(
    lfm2.GGUF,
    architecture="lfm2moe",
    fields={**lfm2.GGUF.fields, "leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "routed_scaling_factor"},
    complete=complete,
)
layer = pre_norm(mix, mixture(NAMES, dense), NORMS)
FAMILY = DecoderFamily(("lfm2_moe",), read, layer, last_norm="embedding_norm", gguf=GGUF, experts=NAMES)
