"""Voxtral: the encoder of Whisper-large-v3, a connector that makes one row of four neighbouring frames, and the decoder of Mistral in the
layout of Llama. The model hears a recording in windows of 30 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.frontend.audio import Joining
from compiler.frontend.audio_tower import read_listening, read_token
from compiler.frontend.config import ModelConfig, read_activation, text_fields
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

DEFAULTS: dict[str, Any] = {  # the defaults of transformers, which are the sizes of Voxtral Mini
    "model_type": "llama",
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000_000.0,
}


def read(fields: Fields) -> ModelConfig:
    text = text_fields(fields, DEFAULTS)
    if text.text("model_type") != "llama":
        raise text.error("model_type", "'llama'")
    config = llama.read(text)
    listening = read_listening(
        fields,
        joining=Joining.JOINED,
        audio_token=read_token(fields, config.vocab_size, None),
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
    )
    return replace(config, family="voxtral", listening=listening)


FAMILY = DecoderFamily(("voxtral",), read, llama.layer)
