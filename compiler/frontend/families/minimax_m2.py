"""MiniMax M2: a mixture of experts in every layer, with sigmoid scores and a bias that corrects the choice of experts; one norm over all
query heads together, and one over all key heads. RoPE rotates part of each head."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder
from compiler.frontend.families import mixtral, olmoe
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import Scoring, read_mixture

CORRECTION = f"{mixtral.BLOCK}.e_score_correction_bias"
NAMES = replace(mixtral.NAMES, correction=CORRECTION)


def read(fields: Fields) -> ModelConfig:
    fields.require(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
    fields.require(shared_intermediate_size=0, sliding_window=None)
    fields.fill(num_key_value_heads=8, head_dim=128, num_local_experts=256, num_experts_per_tok=8, rope_theta=5e6)
    fields.fill(max_position_embeddings=196_608)
    kinds = fields.raw("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise fields.error("attn_type_list", "a list of ones, since all layers have softmax attention")
    fields.skip("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # multi-token prediction: no file contains its layers
    fields.skip("router_jitter_noise")  # for training
    if "rotary_dim" in fields:
        fields.fill(partial_rotary_factor=fields.integer("rotary_dim") / fields.integer("head_dim"))
    found = read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True)
    return replace(read_decoder(fields), mixture=replace(found, scoring=Scoring.SIGMOID))


GGUF = Gguf(
    "minimax-m2",
    {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
)
FAMILY = DecoderFamily(("minimax_m2",), read, pre_norm(olmoe.attention, mixture(NAMES)), gguf=GGUF, experts=NAMES)
