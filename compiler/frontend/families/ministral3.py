"""Ministral 3: Mistral whose queries are scaled up at positions beyond the original context (`original_max_position_embeddings`)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, QueryGrowth, read_decoder, read_one_window, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.rope import rope_fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=262_144)
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, default_head_dim=128))
    rope = rope_fields(fields)
    rope.skip("max_position_embeddings")  # a copy of the field of this name outside the rope
    beta = rope.number("llama_4_scaling_beta", zero=True)
    return replace(
        config,
        query_growth=QueryGrowth(beta, rope.integer("original_max_position_embeddings")) if beta else None,
        windows=read_one_window(fields),
    )


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add `llama_4_scaling_beta`, by which queries grow. The metadata has the key GROWTH, because this key marks files of this family."""
    config["rope_scaling"] = {**(config["rope_scaling"] or {}), "llama_4_scaling_beta": metadata[GROWTH]}


GROWTH = "attention.temperature_scale"
GGUF = Gguf("mistral3", mark=GROWTH, pairs_interleaved=True, complete=complete)
FAMILY = DecoderFamily(("ministral3",), read, llama.layer, gguf=GGUF)
