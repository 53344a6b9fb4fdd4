"""Mistral: Llama with optional sliding windows. transformers since 4.57 calls the type ministral if a file states the kind of each
layer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=131_072)
    # Null means no window. Without the field, layers have the window of the first Mistral model.
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return replace(rotating_whole_heads(read_decoder(fields)), windows=read_windows(fields, window, lambda _: True))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Set `sliding_window` to null if the metadata states no window: if the field were absent, `read` would assume the default window."""
    config.setdefault("sliding_window", None)


# GGUF files of Mistral Small 3.1 and later models name this architecture. Files of earlier models name llama, and omit the window.
GGUF = Gguf("mistral3", pairs_interleaved=True, complete=complete)
FAMILY = DecoderFamily(("mistral", "ministral"), read, llama.layer, divides=True, gguf=GGUF)
