"""Qwen3.5 and 3.6 with mixtures of experts in every layer. The encoder of images is not supported."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import qwen3_5
from compiler.frontend.families.qwen3_next import SHARED_FIELDS, SHARED_RESTORED, mixed, read_experts, read_hybrid
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames

NAMES = ExpertNames(
    "mlp.gate",
    "mlp.experts.*.gate_proj",
    "mlp.experts.*.up_proj",
    "mlp.experts.*.down_proj",
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    halves=True,
)


def read(fields: Fields) -> ModelConfig:
    fields = qwen3_5.text_of(fields, "qwen3_5_moe_text")
    fields.fill(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512)
    fields.fill(intermediate_size=512, norm_topk_prob=True)
    return replace(read_hybrid(fields), mixture=read_experts(fields))


GGUF = replace(
    qwen3_5.GGUF,
    architecture="qwen35moe",
    fields={**qwen3_5.GGUF.fields, **SHARED_FIELDS},
    restored={**qwen3_5.GGUF.restored, **SHARED_RESTORED},
)
FAMILY = DecoderFamily(("qwen3_5_moe", "qwen3_5_moe_text"), read, pre_norm(mixed(qwen3_5.delta), mixture(NAMES)), experts=NAMES, gguf=GGUF)
