"""Granite 3: Llama with constant factors on embeddings, attention scores, logits, and the outputs of attention and MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import ConfigError
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


GGUF_FIELDS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Raise ConfigError if the model has no rope. Add no field."""
    if metadata.get("rope.scaling.finetuned", True) is not True:
        raise ConfigError("rope.scaling.finetuned is false: Granite without a rope is not supported, expected a model with one")


FAMILY = DecoderFamily(
    ("granite",), read, llama.layer, gguf=replace(llama.GGUF, architecture="granite", fields=GGUF_FIELDS, complete=complete)
)
