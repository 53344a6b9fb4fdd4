"""DeepSeek V3 and R1, smaller models such as Moonlight, and Kimi K2: the layers of GLM-4.7-Flash, with other default values of fields. GGUF
files name the architecture deepseek2, and are read as files of GLM-4.7-Flash."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import glm4_moe_lite
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

DEFAULTS = {"intermediate_size": 18432, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
SIZES = {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}


def read(fields: Fields) -> ModelConfig:
    fields.require(scoring_func="sigmoid", moe_layer_freq=1)
    fields.skip("ep_size", "seq_aux", "num_mtp_layers")  # fields about training and multi-token prediction
    fields.fill(**DEFAULTS, **SIZES, max_position_embeddings=4096, routed_scaling_factor=2.5, rms_norm_eps=1e-6)
    if "q_lora_rank" not in fields.values:  # null means that queries have no latent vector
        fields.fill(q_lora_rank=1536)
    return glm4_moe_lite.read(fields)


FAMILY = DecoderFamily(("deepseek_v3", "kimi_k2"), read, glm4_moe_lite.layer, experts=glm4_moe_lite.NAMES)
