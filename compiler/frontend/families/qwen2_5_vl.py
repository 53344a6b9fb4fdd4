"""Qwen2.5-VL: like Qwen2-VL, but in most layers of the encoder, patches of images attend to each other only within windows. The layers of
the encoder have the norms and the gated MLP of decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import llama, qwen2
from compiler.frontend.families.qwen2_vl import ENCODER, NORM_EPS, read_like_qwen, seeing, text_of
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.vision import Tower, Vision

WINDOWED: Mapping[str, Any] = {
    **{name: ENCODER[name] for name in ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")},
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def read(fields: Fields) -> ModelConfig:
    vision = read_windowed(fields, Tower.QWEN2_5) if "vision_config" in fields else None
    text = text_of(fields, "qwen2_5_vl_text")
    config = qwen2.read(text)
    fields.fields("vision_config").require_equal("out_hidden_size", config.hidden_size, "hidden_size of the decoder")
    return seeing(fields, text, config, vision)


def read_windowed(fields: Fields, tower: Tower, **others: Any) -> Vision:
    """Return an encoder whose patches attend within windows, except in the layers `fullatt_block_indexes`, in which they attend to their
    whole crop. `others` are fields of Vision that the family determines. Raise ConfigError if `fullatt_block_indexes` is no list of numbers
    of layers, or if a window is smaller than the square of patches that becomes a token."""
    inner = fields.fields("vision_config", WINDOWED)
    inner.skip("tokens_per_second")  # concerns videos
    whole, edge = inner.raw("fullatt_block_indexes"), inner.integer("patch_size") * inner.integer("spatial_merge_size")
    if not isinstance(whole, list) or not all(type(number) is int and number >= 0 for number in whole):
        raise inner.error("fullatt_block_indexes", "a list of numbers of layers")
    if not (window := inner.integer("window_size") // edge):
        raise inner.error("window_size", f"at least {edge}, the pixels of an edge of a token")
    return read_like_qwen(fields, tower, WINDOWED, norm_eps=NORM_EPS, window=window, whole_layers=frozenset(whole), **others)


FAMILY = DecoderFamily(("qwen2_5_vl", "qwen2_5_vl_text"), read, llama.layer, gguf=Gguf("qwen2vl"))
