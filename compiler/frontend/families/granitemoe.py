"""Granite 3 with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import granite, llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, read_mixture

NAMES = ExpertNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.gate_proj",
    "block_sparse_moe.up_proj",
    "block_sparse_moe.down_proj",
    stacked=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    halves=True,
)
EXPERTS = mixture(NAMES)


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2)
    fields.require(position_embedding_type="rope")
    return replace(granite.read(fields), mixture=read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True))


GGUF_FIELDS = {**granite.GGUF_FIELDS, "expert_count": "num_local_experts"}
GGUF = replace(llama.GGUF, architecture="granitemoe", fields=GGUF_FIELDS, complete=granite.complete)
FAMILY = DecoderFamily(("granitemoe",), read, pre_norm(attention, EXPERTS), gguf=GGUF, experts=NAMES)
