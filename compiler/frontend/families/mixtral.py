"""Mixtral: Llama with a mixture of experts in every layer, and optional sliding windows. GGUF files name the architecture llama."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, read_one_window, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, read_mixture

BLOCK = "block_sparse_moe"
NAMES = ExpertNames(f"{BLOCK}.gate", f"{BLOCK}.experts.*.w1", f"{BLOCK}.experts.*.w3", f"{BLOCK}.experts.*.w2")


def read(fields: Fields) -> ModelConfig:
    fields.fill(num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, rope_theta=1e6, max_position_embeddings=131_072)
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5))
    windows = read_one_window(fields)
    return replace(config, windows=windows, mixture=read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True))


layer = pre_norm(attention, mixture(NAMES))
GGUF = Gguf("llama", {"expert_count": "num_local_experts"}, mark="expert_count", pairs_interleaved=True)
FAMILY = DecoderFamily(("mixtral",), read, layer, gguf=GGUF, experts=NAMES)
