"""GLM-4.7-Flash: multi-head latent attention; a plain MLP in the first layers, then mixtures of experts with a shared expert."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import Latent, ModelConfig, read_decoder
from compiler.frontend.families import deepseek_v2
from compiler.frontend.families.deepseek_v2 import complete_latent, complete_strength, strength_of
from compiler.frontend.families.glm4_moe import NAMES, read_shared_mixture
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import pre_norm
from compiler.frontend.layers.latent import latent_attention
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import Mixture
from compiler.frontend.rope import read_rope

KINDS = ("dense", "sparse")  # kinds in mlp_layer_types: a plain MLP, experts


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=10240, n_routed_experts=64, num_experts_per_tok=4, moe_intermediate_size=1536, norm_topk_prob=True)
    fields.fill(max_position_embeddings=202_752, routed_scaling_factor=1.8)
    config, latent = read_decoder(fields, eps=1e-5, bias="attention_bias"), _read_latent(fields)
    rope = read_rope(fields, latent.rotated_size)
    if rope.size != latent.rotated_size:
        raise fields.error("partial_rotary_factor", "1, because partial rotation is not supported")
    predicting = range(config.num_layers, config.num_layers + fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=100))
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.kept_size,
        attention_scale=(latent.plain_size + latent.rotated_size) ** -0.5 * strength_of(fields) ** 2,
        rope=replace(rope, interleaved=fields.flag("rope_interleave", True)),
        latent=latent,
        mixture=_read_mixture(fields, config.num_layers),
        unused=tuple(f"*layers.{layer}.*" for layer in predicting),
    )


def _read_latent(fields: Fields) -> Latent:
    """Return the sizes of latent attention. Raise ConfigError if `qk_head_dim` is not the sum of the sizes of a head's two parts."""
    found = Latent(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=fields.integer("q_lora_rank", None if "q_lora_rank" in fields.values else 768),  # null: no latent vector
        plain_size=fields.integer("qk_nope_head_dim", 192),
        rotated_size=fields.integer("qk_rope_head_dim", 64),
        value_size=fields.integer("v_head_dim", 256),
    )
    if fields.integer("qk_head_dim", whole := found.plain_size + found.rotated_size) != whole:
        raise fields.error("qk_head_dim", f"{whole}: qk_nope_head_dim + qk_rope_head_dim")
    return found


def _read_mixture(fields: Fields, num_layers: int) -> Mixture:
    """Return the mixture. The layers without experts are those that `mlp_layer_types` calls dense. If this field is absent, they are the
    first `first_k_dense_replace` layers. Raise ConfigError if `mlp_layer_types` is no list with one of KINDS per layer."""
    found = read_shared_mixture(fields)
    fields.require(topk_method="noaux_tc")
    kinds = fields.raw("mlp_layer_types", [KINDS[layer not in found.dense_layers] for layer in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(KINDS).issuperset(kinds):
        raise fields.error("mlp_layer_types", f"a list of {num_layers} entries, each {' or '.join(KINDS)}")
    return replace(found, dense_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense"))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    complete_latent(config, metadata)
    complete_strength(config)
    config.setdefault("q_lora_rank", None)  # if the metadata lacks this field, queries have no latent vector


layer = pre_norm(latent_attention, mixture(NAMES))
# Files of DeepSeek V2 name the architecture deepseek2, too.
# The mark distinguishes files of this family, because only this family normalises the weights of the chosen experts.
GGUF = replace(deepseek_v2.GGUF, mark="expert_weights_norm", complete=complete)
FAMILY = DecoderFamily(("glm4_moe_lite",), read, layer, gguf=GGUF, experts=NAMES)
