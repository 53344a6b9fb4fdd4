"""Granite 3: Llama with multipliers of embeddings, branches, attention and logits."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    return replace(
        llama.read(fields),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = DecoderFamily(("granite",), read, llama.layer)
