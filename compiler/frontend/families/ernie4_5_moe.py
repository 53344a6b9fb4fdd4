"""ERNIE 4.5 with mixtures of experts: some layers, by default only the first, have a plain MLP, and all other layers have experts and
shared experts. A bias on the router's scores affects which experts are chosen, but not their weights."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import ernie4_5
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, read_mixture

NAMES = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias", correction_rank=2, shared="mlp.shared_experts")
# The weights of a token's experts are divided by their sum, or by moe_norm_min if the sum is less.
# A moe_norm_min of at most LEAST_SUM is ignored: in practice, the sum of the chosen scores of a softmax is larger.
LEAST_SUM = 1e-6


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=12288, num_key_value_heads=4, moe_intermediate_size=1536, moe_num_experts=64, moe_k=6)
    fields.fill(num_experts_per_tok=fields.integer("moe_k"))
    if fields.number("moe_norm_min", 1e-12) > LEAST_SUM:
        raise fields.error("moe_norm_min", f"at most {LEAST_SUM}")
    fields.require(use_bias=False, moe_gate="topk", moe_use_aux_free=True)
    # Fields about training and multi-token prediction.
    fields.skip("moe_capacity", "num_nextn_predict_layers", "moe_group", "moe_aux_loss_lambda", "moe_orthogonal_loss_lambda")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    fields.fill(head_dim=head_dim)
    config = ernie4_5.read(fields)
    found = read_mixture(fields, "moe_num_experts", "moe_intermediate_size", normalized=True)
    shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    return replace(
        config,
        mixture=replace(found, shared_size=found.size * shared, dense_layers=_read_dense(fields, config.num_layers)),
        unused=("model.mtp*",),
    )


def _read_dense(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers without experts. A layer has experts if it is not before `moe_layer_start_index` or after `moe_layer_end_index`
    (-1: the last layer), and its number, counted from 1, is a multiple of `moe_layer_interval`."""
    first, every = fields.integer("moe_layer_start_index", 1, minimum=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = num_layers - 1 if last == -1 else last
    return frozenset(layer for layer in range(num_layers) if not (first <= layer <= last and (layer + 1) % every == 0))


FAMILY = DecoderFamily(("ernie4_5_moe",), read, pre_norm(attention, mixture(NAMES)), experts=NAMES)
