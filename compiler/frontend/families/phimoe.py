"""Phi-3.5-MoE: a mixture of experts in every layer, routed by SparseMixer, and layer norms."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, Norm, read_decoder, read_one_window, rotating_whole_heads
from compiler.frontend.families import mixtral
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.mixture import Mixture, read_mixture
from compiler.frontend.rope import LongScaling, Rope, read_rope, rope_fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2, max_position_embeddings=131_072)
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, bias="attention_bias"))
    return replace(
        config,
        rope=_read_rope(fields, config.head_dim),
        windows=read_one_window(fields),
        norm=Norm.LAYER,
        head_bias=fields.flag("lm_head_bias", False),
        mixture=_read_mixture(fields),
    )


def _read_rope(fields: Fields, head_dim: int) -> Rope:
    """Read the rope. A file with a longrope must state the two factors of cosines and sines, one for short and one for long contexts. Raise
    ConfigError for any other scaling."""
    rope, given = read_rope(fields, head_dim, theta=1e6), rope_fields(fields)
    if isinstance(rope.scaling, LongScaling):
        return replace(rope, scaling=replace(rope.scaling, attention_factors=(given.number("short_mscale"), given.number("long_mscale"))))
    if rope.scaling is not None:
        raise given.error("rope_type", "default or longrope")
    return rope


def _read_mixture(fields: Fields) -> Mixture:
    fields.skip("input_jitter_noise")  # for training
    found = read_mixture(fields, "num_local_experts", "intermediate_size", normalized=False)
    if found.num_chosen != 2:
        raise fields.error("num_experts_per_tok", "2")
    # SparseMixer's limit of the relative distance between logits is twice the noise that was added in training.
    return replace(found, sparse_limit=2 * fields.number("router_jitter_noise", 0.01, zero=True))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add whether the head has a bias and, for a scaled rope, the factors of its cosines and sines. The metadata has a factor that is
    computed from the context. This factor is ignored, because all published models have the factor MSCALE."""
    config["lm_head_bias"] = "output.bias" in tensors
    if isinstance(scaling := config.get("rope_scaling"), dict):
        scaling |= {"short_mscale": MSCALE, "long_mscale": MSCALE}


MSCALE = 1.243163121016122  # the factor of RoPE's sines and cosines in all published models
GGUF = Gguf(
    "phimoe",
    {"expert_count": "num_local_experts", "attention.sliding_window": "sliding_window"},
    biases={"attention_bias": "attn_output"},
    complete=complete,
)
FAMILY = DecoderFamily(("phimoe",), read, mixtral.layer, gguf=GGUF, experts=mixtral.NAMES)
