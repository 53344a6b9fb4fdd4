"""GLM-4.5 and 4.6: a plain MLP in the first layers, then mixtures of experts with shared experts. RoPE rotates half of each head."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attention, head_norm_attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, Mixture, Scoring, read_mixture
from compiler.ir.graph.atoms import Var

NAMES = ExpertNames(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts")


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.5, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, norm_topk_prob=True)
    fields.fill(max_position_embeddings=131_072)
    config = read_decoder(fields, eps=1e-5)
    predicting = range(config.num_layers, config.num_layers + fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=100))
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias", False),
        head_norms=fields.flag("use_qk_norm", False),
        mixture=read_shared_mixture(fields),
        unused=tuple(f"*layers.{layer}.*" for layer in predicting),
    )


def read_shared_mixture(fields: Fields) -> Mixture:
    """Read a mixture with sigmoid scores, groups of experts, shared experts, and dense first layers. Raise ConfigError if the groups do not
    have equal numbers of experts, or if the chosen groups have fewer experts than a token chooses."""
    found = read_mixture(fields, "n_routed_experts", "moe_intermediate_size")
    groups = fields.integer("n_group", 1)
    if found.num_experts % groups:
        raise fields.error("n_group", f"a divisor of n_routed_experts ({found.num_experts})")
    chosen = fields.integer("topk_group", 1, maximum=groups)
    if found.num_chosen > chosen * (found.num_experts // groups):
        raise fields.error("topk_group", f"groups with at least num_experts_per_tok ({found.num_chosen}) experts together")
    return replace(
        found,
        scoring=Scoring.SIGMOID,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        num_chosen_groups=chosen,
        shared_size=found.size * fields.integer("n_shared_experts", 1, minimum=0),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 1, minimum=0))),
    )


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(head_norm_attention if at.step.config.head_norms else attention, mixture(NAMES))(at, x)


GGUF_FIELDS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
GGUF = Gguf(
    "glm4moe",
    GGUF_FIELDS,
    {"post_attention_norm": "post_attention_layernorm"},
    biases={"attention_bias": "attn_q"},
    query_norm="use_qk_norm",
)
FAMILY = DecoderFamily(("glm4_moe",), read, layer, gguf=GGUF, experts=NAMES)
