"""Mistral: Llama with sliding windows. Its GGUF files call themselves llama."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    # Null means none, but where the field is absent the window of the first Mistral applies.
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return replace(rotating_whole_heads(read_decoder(fields)), windows=read_windows(fields, window, lambda _: True))


FAMILY = DecoderFamily(("mistral",), read, llama.layer)
