"""SmolLM3: Llama in which some layers have no rotary positions. If `use_sliding_window` is true, these layers have a window."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(rope_theta=2e6, tie_word_embeddings=True, num_key_value_heads=4, max_position_embeddings=32_768)
    config = rotating_whole_heads(read_decoder(fields, bias="attention_bias"))
    unrotated = read_unrotated(fields, config.num_layers)
    window = fields.integer("sliding_window", None)
    fields.skip("max_window_layers")  # a field of Qwen2 that files contain, and that no version of SmolLM3's code reads
    return replace(
        config,
        mlp_bias=fields.flag("mlp_bias", False),
        unrotated=unrotated,
        windows=read_windows(fields, window if fields.flag("use_sliding_window", False) else None, lambda layer: layer in unrotated),
    )


def read_unrotated(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers without RoPE. Despite its name, `no_rope_layers` has a 1 for each layer with RoPE. If this field is absent or
    empty, every `no_rope_layer_interval`-th layer has no RoPE. Raise ConfigError if the list is too short or has other numbers than 0 and
    1."""
    period = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.raw("no_rope_layers")
    if rotates is None or rotates == []:
        rotates = [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) < num_layers or any(value not in (0, 1) for value in rotates):
        raise fields.error("no_rope_layers", f"a list of {num_layers} entries, each 0 or 1")
    return frozenset(layer for layer in range(num_layers) if not rotates[layer])


FAMILY = DecoderFamily(("smollm3",), read, llama.layer, gguf=replace(llama.GGUF, architecture="smollm3"))
