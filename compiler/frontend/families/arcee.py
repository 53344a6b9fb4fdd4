"""Arcee (AFM): Llama whose MLP has no gate. Unless the configuration says otherwise, the activation is relu(x) squared."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama, nemotron
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(hidden_act="relu2", rms_norm_eps=1e-5, max_position_embeddings=4096)
    return llama.read(fields)


FAMILY = DecoderFamily(("arcee",), read, nemotron.layer, gguf=replace(llama.GGUF, architecture="arcee"))
