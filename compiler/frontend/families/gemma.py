"""Gemma 1: Llama with scaled embeddings, and norms that multiply by 1 + weight."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import Activation, ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192)
    fields.skip("hidden_activation")  # some files have this field beside hidden_act
    config = rotating_whole_heads(read_decoder(fields, default_head_dim=256, bias="attention_bias"))
    return replace(
        config,
        # The configurations of the first models say "gelu" but mean its tanh approximation.
        activation=Activation.GELU_TANH if config.activation is Activation.GELU else config.activation,
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
    )


FAMILY = DecoderFamily(("gemma",), read, llama.layer, gguf=Gguf("gemma", norm_offset=1.0))
