"""Cohere 2 (Command R7B, Command A): Cohere with windows, and with rotary positions only in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_windows
from compiler.frontend.families import cohere
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    # Skip fields of the original code that have the same value in all models.
    fields.skip("rotary_pct", "position_embedding_type", "order_of_interleaved_layers", "use_embedding_sharing", "use_parallel_block")
    fields.skip("use_parallel_embedding", "use_gated_activation", "layer_switch")
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 4))
    windows = read_windows(fields, fields.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
    return replace(
        cohere.read_cohere(fields),
        windows=windows,
        unrotated=frozenset(layer for layer, window in enumerate(windows) if window is None),
    )


GGUF_FIELDS = {**cohere.GGUF_FIELDS, "attention.sliding_window": "sliding_window"}
FAMILY = DecoderFamily(("cohere2",), read, cohere.layer, gguf=Gguf("cohere2", GGUF_FIELDS))
