"""Qwen2-VL: an encoder of images of any size, with RoPE by row and column, and the decoder of Qwen2, in which the tokens of an
image have three coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.cutting import FREE
from compiler.frontend.families import llama, qwen2
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.rope import read_axes
from compiler.frontend.towers import QWEN_NAMES, FieldNames, check_tokens, read_any_size, read_merge
from compiler.frontend.vision import Connector, Tower, Vision

ENCODER: Mapping[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "num_heads": 16,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SECTIONS = (16, 24, 24)  # default numbers of rotated pairs per axis: see `read_axes`
UNREAD = ("model_type", "spatial_patch_size", "init_std", "tie_word_embeddings")
IMAGE_TOKEN, IMAGE_TOKEN_ID = "image_token_id", 151_655
NORM_EPS = 1e-6


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields) if "vision_config" in fields else None
    text = text_of(fields, "qwen2_vl_text")
    config = qwen2.read(text)
    fields.fields("vision_config").require_equal("hidden_size", config.hidden_size, "hidden_size of the decoder")
    return seeing(fields, text, config, vision)


def text_of(fields: Fields, kind: str) -> Fields:
    """Return the fields of the decoder, with defaults of the family. Older files have these fields at the top level; newer files have them
    in `text_config`, whose default of `model_type` is `kind`."""
    text = text_fields(fields, {"model_type": kind}) if "text_config" in fields else fields
    fields.skip("vision_config", IMAGE_TOKEN, "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
    text.fill(rms_norm_eps=1e-5, num_key_value_heads=8, rope_theta=1e6)
    return text


def seeing(
    fields: Fields,
    text: Fields,
    config: ModelConfig,
    vision: Vision | None,
    sections: tuple[int, int, int] = SECTIONS,
    *,
    interleaved: bool = False,
) -> ModelConfig:
    """Return the configuration of a decoder with its encoder of images, or `config` itself if `vision` is None. `text` has the fields of
    the decoder. `sections` and `interleaved` are the arguments `default` and `interleaved` of `read_axes`."""
    if vision is None:
        return config
    assert config.rope is not None
    check_tokens(fields, vision, config.vocab_size, (IMAGE_TOKEN,))
    axes = read_axes(text, config.rope.size // 2, sections, interleaved=interleaved)
    return replace(config, vision=vision, rope=replace(config.rope, axes=axes))


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    size, ratio = inner.integer("embed_dim"), inner.number("mlp_ratio")
    if not (size * ratio).is_integer():
        raise inner.error("mlp_ratio", f"a number that makes embed_dim ({size}) an integer")
    names = replace(QWEN_NAMES, size="embed_dim")
    return read_like_qwen(fields, Tower.QWEN2, ENCODER, names, norm_eps=NORM_EPS, intermediate_size=int(size * ratio))


def read_like_qwen(fields: Fields, tower: Tower, defaults: Mapping[str, Any], names: FieldNames = QWEN_NAMES, **others: Any) -> Vision:
    """Return an encoder like that of Qwen2-VL. `others` are the fields of Vision in which it differs from Qwen2-VL. An `image_token` among
    them is only the default of the field `image_token_id`."""
    inner = fields.fields("vision_config", defaults)
    inner.skip(*UNREAD)
    image_token = fields.integer(IMAGE_TOKEN, others.pop("image_token", IMAGE_TOKEN_ID), minimum=0)
    fixed: dict[str, Any] = {"connector": Connector.PERCEPTRON, "cutting": FREE, "three_axes": True, "is_optional": True}
    return read_any_size(
        inner,
        tower,
        defaults,
        names,
        merge=read_merge(inner, "spatial_merge_size"),
        num_frames=inner.integer("temporal_patch_size"),
        image_token=image_token,
        **{**fixed, **others},
    )


FAMILY = DecoderFamily(("qwen2_vl", "qwen2_vl_text"), read, llama.layer)
