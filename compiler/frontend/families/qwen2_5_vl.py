"""Qwen2.5-VL: like Qwen2-VL, but patches of images attend to each other within windows in most layers of the encoder, whose layers are like
those of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation
from compiler.frontend.cutting import FREE
from compiler.frontend.families import llama, qwen2
from compiler.frontend.families.qwen2_vl import ENCODER, IMAGE_TOKEN, IMAGE_TOKEN_ID, NORM_EPS, UNREAD, seeing, text_of
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.towers import read_square
from compiler.frontend.vision import Connector, Tower, Vision

WINDOWED: Mapping[str, Any] = {
    **{name: ENCODER[name] for name in ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")},
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields) if "vision_config" in fields else None
    text = text_of(fields, "qwen2_5_vl_text")
    config = qwen2.read(text)
    fields.fields("vision_config").require_equal("out_hidden_size", config.hidden_size, "hidden_size of the decoder")
    return seeing(fields, text, config, vision)


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", WINDOWED)
    inner.skip(*UNREAD, "tokens_per_second")  # which concerns videos
    shared = read_square(inner, inner.integer("hidden_size"))
    num_layers, whole = inner.integer("depth", maximum=1000), inner.raw("fullatt_block_indexes")
    if not isinstance(whole, list) or not all(type(number) is int and number >= 0 for number in whole):
        raise inner.error("fullatt_block_indexes", "a list of numbers of layers")
    if not (window := inner.integer("window_size") // shared["crop_size"]):
        raise inner.error("window_size", f"at least {shared['crop_size']}, the pixels of an edge of a token")
    return Vision(
        **shared,
        tower=Tower.QWEN2_5,
        intermediate_size=inner.integer("intermediate_size"),
        num_layers=num_layers,
        activation=read_activation(inner, "hidden_act", "silu"),
        norm_eps=NORM_EPS,
        connector=Connector.PERCEPTRON,
        image_token=fields.integer(IMAGE_TOKEN, IMAGE_TOKEN_ID, minimum=0),
        cutting=FREE,
        window=window,
        whole_layers=frozenset(whole),
        three_axes=True,
        is_optional=True,
    )


FAMILY = DecoderFamily(("qwen2_5_vl", "qwen2_5_vl_text"), read, llama.layer, gguf=Gguf("qwen2vl"))
