"""Qwen3-VL: an encoder of images of any size with an interpolated table of positions, and the decoder of Qwen3. The results of several
layers of the encoder are added to the residual stream after the first layers of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import isqrt
from typing import Any

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import qwen3
from compiler.frontend.families.qwen2_vl import NORM_EPS, read_like_qwen, seeing
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.vision import Tower, Vision

ENCODER: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SECTIONS = (24, 20, 20)  # default numbers of rotated pairs per axis: see `read_axes`


def read(fields: Fields) -> ModelConfig:
    return read_seeing(fields, "qwen3_vl_text", qwen3.read)


def read_seeing(fields: Fields, kind: str, decoder: Callable[[Fields], ModelConfig]) -> ModelConfig:
    """Return the configuration of a model with Qwen3-VL's encoder, or that of its decoder alone if there is no `vision_config`. `decoder`
    reads the fields of the decoder, and `kind` is the default of `model_type` in `text_config`. Raise ConfigError if the encoder does not
    fit the decoder: if its output has another size, or if more of its layers add results to the decoder than the decoder has layers."""
    vision = _read_vision(fields) if "vision_config" in fields else None
    text = text_fields(fields, {"model_type": kind}) if "text_config" in fields else fields
    text.fill(rope_theta=500_000.0, max_position_embeddings=128_000)
    config = decoder(text)
    if vision is None:
        return config
    inner = fields.fields("vision_config")
    inner.require_equal("out_hidden_size", config.hidden_size, "hidden_size of the decoder")
    if len(vision.deep_layers) > config.num_layers:
        raise inner.error("deepstack_visual_indexes", f"at most {config.num_layers} layers, as the decoder has no more")
    return seeing(fields, text, config, vision, SECTIONS, interleaved=True)


def _read_vision(fields: Fields) -> Vision:
    """Return the configuration of the encoder. Raise ConfigError if `deepstack_visual_indexes` is no list of layer numbers in ascending
    order, or if the table of positions is not square."""
    inner = fields.fields("vision_config", ENCODER)
    num_layers, deep = inner.integer("depth", maximum=1000), inner.raw("deepstack_visual_indexes", [])
    are_layers: bool = isinstance(deep, list) and all(type(number) is int and 0 <= number < num_layers for number in deep)
    if not are_layers or any(later <= earlier for earlier, later in pairwise(deep)):
        raise inner.error("deepstack_visual_indexes", f"a list of rising numbers of layers below {num_layers}")
    num_positions = inner.integer("num_position_embeddings")
    if (edge := isqrt(num_positions)) ** 2 != num_positions:
        raise inner.error("num_position_embeddings", "the square of a number")
    return read_like_qwen(fields, Tower.QWEN3, ENCODER, norm_eps=NORM_EPS, table_edge=edge, deep_layers=tuple(deep))


FAMILY = DecoderFamily(("qwen3_vl", "qwen3_vl_text"), read, qwen3.layer, gguf=Gguf("qwen3vl"))
