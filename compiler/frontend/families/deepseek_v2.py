"""DeepSeek V2 without groups of experts, such as V2-Lite: multi-head latent attention, a plain MLP in the first layers, and mixtures with
shared experts in all other layers."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import Latent, ModelConfig, read_decoder, rotating_neighbours
from compiler.frontend.families import glm4_moe
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import pre_norm
from compiler.frontend.layers.latent import latent_attention
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, Mixture, read_mixture
from compiler.frontend.rope import rope_fields

NAMES = ExpertNames(shared="mlp.shared_experts")


def read(fields: Fields) -> ModelConfig:
    fields.require(topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    # n_group and topk_group matter only with other values of topk_method; ep_size and seq_aux concern training
    fields.skip("n_group", "topk_group", "ep_size", "seq_aux")
    rotated, plain = fields.integer("qk_rope_head_dim", 64), fields.integer("qk_nope_head_dim", 128)
    fields.skip("head_dim", "qk_head_dim", "num_key_value_heads")  # derived from other fields
    fields.values = {**fields.values, "head_dim": rotated, "num_key_value_heads": fields.integer("num_attention_heads")}
    fields.require(attention_bias=False, mlp_bias=False)
    config = rotating_neighbours(read_decoder(fields))
    rank, query_rank, value = fields.integer("kv_lora_rank", 512), fields.integer("q_lora_rank", None), fields.integer("v_head_dim", 128)
    return replace(
        config,
        num_kv_heads=1,
        head_dim=rank + rotated,
        attention_scale=(plain + rotated) ** -0.5 * strength_of(fields) ** 2,
        latent=Latent(rank, query_rank, plain, rotated, value),
        mixture=_read_mixture(fields),
    )


def strength_of(fields: Fields) -> float:
    """Return the factor by which a scaled rope multiplies both queries and keys. The factor is computed from the field `mscale_all_dim`.
    The result is 1 if `mscale_all_dim` is absent or 0, or if the field `factor` is absent or at most 1."""
    scaling = rope_fields(fields)
    weight, factor = scaling.number("mscale_all_dim", None, zero=True), scaling.number("factor", 1.0)
    return 0.1 * weight * math.log(factor) + 1 if weight and factor > 1 else 1.0


def _read_mixture(fields: Fields) -> Mixture:
    found = read_mixture(fields, "n_routed_experts", "moe_intermediate_size")
    return replace(
        found,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared_size=found.size * fields.integer("n_shared_experts", 0, minimum=0),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 0, minimum=0))),
    )


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the sizes of heads and the fields of a scaled rope. If there are groups of experts or sigmoid scores, add values that `read`
    refuses."""
    complete_latent(config, metadata)
    if config.get("n_group", 1) != 1:
        config["topk_method"] = "group_limited_greedy"  # `read` refuses this value
    if metadata.get("expert_gating_func", SOFTMAX) != SOFTMAX:
        config["scoring_func"] = "sigmoid"  # `read` refuses this value
    complete_strength(config)


def complete_strength(config: dict[str, Any]) -> None:
    """Restore `mscale_all_dim` and `mscale` of a scaled rope, if the metadata states `mscale_all_dim`."""
    if isinstance(scaling := config.get("rope_scaling"), dict) and isinstance(weight := scaling.get("mscale_all_dim"), float):
        # Converters divide mscale_all_dim by 10, and omit mscale, which has the same value.
        config["rope_scaling"] = {**scaling, "mscale_all_dim": 10 * weight, "mscale": 10 * weight}


def complete_latent(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Add the sizes of the key and the value of a projected head. Newer files state these sizes in keys that end in `_mla`. Older files
    state them in `attention.key_length` and `attention.value_length`, because llama.cpp then cached projected heads. Remove `head_dim`,
    `num_key_value_heads` and `partial_rotary_factor`, which describe the cached latent vector in newer files."""
    key, value = (metadata.get(f"attention.{part}_length_mla", metadata.get(f"attention.{part}_length")) for part in ("key", "value"))
    rotated = metadata.get("rope.dimension_count")
    if type(key) is int and type(rotated) is int:
        config["qk_nope_head_dim"] = key - rotated
    for name, size in (("qk_rope_head_dim", rotated), ("v_head_dim", value)):
        if size is not None:
            config[name] = size
    for name in ("head_dim", "num_key_value_heads", "partial_rotary_factor"):
        config.pop(name, None)


def adapt(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    """Record in `apart` whether the matrices of keys and of values are separate tensors. Older converters store both in one tensor."""
    return replace(config, apart="blk.0.attn_k_b.weight" in tensors)


SOFTMAX = 1  # value of expert_gating_func in files of models whose router's scores are a softmax
GGUF = Gguf(
    "deepseek2",
    {**glm4_moe.GGUF_FIELDS, "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    complete=complete,
    adapt=adapt,
)
FAMILY = DecoderFamily(("deepseek_v2",), read, pre_norm(latent_attention, mixture(NAMES)), gguf=GGUF, experts=NAMES)
