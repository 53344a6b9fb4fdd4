"""DeepSeek V2 without groups of experts, such as V2-Lite: multi-head latent attention, and mixtures with shared experts."""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.frontend.config import Latent, ModelConfig, read_decoder, rotating_neighbours
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, pre_norm
from compiler.frontend.layers.latent import latent_attention
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, Mixture, read_mixture
from compiler.frontend.rope import rope_fields
from compiler.ir.graph.atoms import Var

NAMES = ExpertNames(shared="mlp.shared_experts")
REQUIRED = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}


def read(fields: Fields) -> ModelConfig:
    for name, value in REQUIRED.items():
        if fields.raw(name, value) != value:
            raise fields.error(name, repr(value))
    # n_group and topk_group matter only to other values of topk_method; the other fields concern training
    fields.skip("n_group", "topk_group", "ep_size", "seq_aux")
    rotated, plain = fields.integer("qk_rope_head_dim", 64), fields.integer("qk_nope_head_dim", 128)
    fields.skip("head_dim", "qk_head_dim", "num_key_value_heads")  # derived from the other fields
    fields.values = {**fields.values, "head_dim": rotated, "num_key_value_heads": fields.integer("num_attention_heads")}
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.error(name, "false")
    config = rotating_neighbours(read_decoder(fields))
    rank, query_rank, value = fields.integer("kv_lora_rank", 512), fields.integer("q_lora_rank", None), fields.integer("v_head_dim", 128)
    scaling = rope_fields(fields)
    weight, factor = scaling.number("mscale_all_dim", None, zero=True), scaling.number("factor", 1.0)
    strength = 0.1 * weight * math.log(factor) + 1 if weight and factor > 1 else 1.0
    return replace(
        config,
        num_kv_heads=1,
        head_dim=rank + rotated,
        attention_scale=(plain + rotated) ** -0.5 * strength**2,
        latent=Latent(rank, query_rank, plain, rotated, value),
        mixture=_read_mixture(fields),
    )


def _read_mixture(fields: Fields) -> Mixture:
    found = read_mixture(fields, "n_routed_experts", "moe_intermediate_size")
    return replace(
        found,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared_size=found.size * fields.integer("n_shared_experts", 0, minimum=0),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 0, minimum=0))),
    )


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(at, x, latent_attention, mixture(NAMES))


FAMILY = DecoderFamily(("deepseek_v2",), read, layer, experts=NAMES)
