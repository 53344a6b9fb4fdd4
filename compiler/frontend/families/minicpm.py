"""MiniCPM 1 to 4: Llama with constant factors on embeddings, logits, and the outputs of attention and MLP. Models with experts or sparse
attention are not supported."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(tie_word_embeddings=True)
    fields.skip("mup_denominator")  # a field of draft models
    config = llama.read(fields)
    return replace(
        config,
        embedding_scale=float(fields.number("scale_emb")),
        residual_scale=fields.number("scale_depth") / config.num_layers**0.5,
        logit_scale=fields.integer("dim_model_base") / config.hidden_size,
    )


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the fields from which the factors are computed. For factors that older files do not state, add the values that these fields have
    in all published models."""
    layers, size = config.get("num_hidden_layers"), config.get("hidden_size")
    branch, divisor = metadata.get("residual_scale"), metadata.get("logit_scale")
    config["scale_emb"] = metadata.get("embedding_scale", 12.0)
    config["scale_depth"] = branch * layers**0.5 if isinstance(branch, float) and type(layers) is int and layers > 0 else 1.4
    config["dim_model_base"] = round(size / divisor) if isinstance(divisor, float) and type(size) is int and 0 < divisor <= size else 256


GGUF = replace(llama.GGUF, architecture="minicpm", complete=complete)
FAMILY = DecoderFamily(("minicpm",), read, llama.layer, gguf=GGUF)
