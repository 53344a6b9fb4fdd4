"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(max_position_embeddings=32_768)
    config = rotating_whole_heads(read_decoder(fields))
    return replace(config, qkv_bias=True, windows=read_qwen_windows(fields), max_context=_read_max_context(fields, config.max_context))


def _read_max_context(fields: Fields, declared: int) -> int:
    """Return the maximum context, in tokens: `declared`, or less if the model was trained with dual chunk attention. Dual chunk attention
    is not supported, but equals plain attention in sequences of at most `chunk_size` - `local_size` tokens. Raise ConfigError if
    `local_size` is not less than `chunk_size`."""
    if "dual_chunk_attention_config" not in fields:
        return declared
    chunks = fields.fields("dual_chunk_attention_config")
    chunks.skip("original_max_position_embeddings")
    chunk, local = chunks.integer("chunk_size"), chunks.integer("local_size", minimum=0)
    if local >= chunk:
        raise chunks.error("local_size", f"less than chunk_size ({chunk})")
    return min(declared, chunk - local)


def read_qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer. If `use_sliding_window` is true and `sliding_window` is not null, layers with a number of at least
    `max_window_layers` have a window, unless `layer_types` says otherwise. If `use_sliding_window` is false, no layer has a window, and
    `sliding_window` may have any value, such as the 0 of files that transformers 5 wrote. Raise ConfigError if `layer_types` has windows
    and no size is known for them."""
    first, window = fields.integer("max_window_layers", 28, minimum=0), None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    fields.skip("sliding_window")
    return read_windows(fields, window, lambda layer: layer >= first)


FAMILY = DecoderFamily(("qwen2",), read, llama.layer, divides=True, gguf=Gguf("qwen2"))
