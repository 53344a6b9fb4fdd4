"""EXAONE 4: OLMo 2 with a norm of each query head and each key head, instead of one norm over all heads. In models with windows, the layers
without a window have no RoPE."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import olmo2
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import head_norm_attention, post_norm


def read(fields: Fields) -> ModelConfig:
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5))
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    local = _read_local(fields, config.num_layers) if window is not None else [False] * config.num_layers
    fields.skip("sliding_window_pattern")  # transformers writes 0 if there is no window
    windows = read_windows(fields, window, local.__getitem__)
    unrotated = frozenset(layer for layer, size in enumerate(windows) if size is None) if window is not None else frozenset[int]()
    return replace(config, windows=windows, unrotated=unrotated)


def _read_local(fields: Fields, num_layers: int) -> list[bool]:
    """Return, for each layer, whether the layer has a window. If the field `sliding_window_pattern` is a text such as "LLLG" (L: window, G:
    no window), the layers repeat this pattern, except that the last layer of the model never has a window. If the field is a number n (by
    default 4), every n-th layer has no window. Raise ConfigError for other values."""
    pattern = fields.raw("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [pattern[layer % len(pattern)] == "L" and layer + 1 < num_layers for layer in range(num_layers)]
    period = fields.integer("sliding_window_pattern", 4, maximum=1000)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Set `sliding_window` to null if the metadata states no window: if the field were absent, `read` would assume the default window."""
    config.setdefault("sliding_window", None)


GGUF = Gguf("exaone4", {"attention.sliding_window": "sliding_window"}, olmo2.GGUF_LAYER_NAMES, complete=complete)
FAMILY = DecoderFamily(("exaone4",), read, post_norm(head_norm_attention), gguf=GGUF)
