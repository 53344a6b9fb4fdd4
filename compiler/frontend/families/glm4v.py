"""GLM-4.1V and GLM-4.6V-Flash: an encoder of images of any size, and the decoder of GLM-4 of 2025, in which the tokens of an image have
three coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.cutting import GLM
from compiler.frontend.families import glm, glm4
from compiler.frontend.families.qwen2_vl import read_like_qwen, seeing
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.towers import QWEN_NAMES
from compiler.frontend.vision import Tower, Vision

ENCODER: Mapping[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13_696,
    "out_hidden_size": 4096,
    "num_heads": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SECTIONS = (8, 12, 12)  # default numbers of rotated pairs per axis: see `read_axes`
IMAGE_TOKEN_ID = 151_343


def read(fields: Fields) -> ModelConfig:
    return read_seeing(fields, "glm4v_text", _read_text, IMAGE_TOKEN_ID)


def read_seeing(fields: Fields, kind: str, decoder: Callable[[Fields], ModelConfig], image_token: int) -> ModelConfig:
    """Return the configuration of a model that sees, or that of its decoder alone if there is no `vision_config`. `decoder` reads the
    fields of the decoder. If these fields are in a `text_config`, the `model_type` in it must be `kind`, in any spelling; otherwise raise
    ConfigError. `image_token` is the default of `image_token_id`."""
    vision = _read_vision(fields, image_token) if "vision_config" in fields else None
    text = text_fields(fields, {"model_type": kind}) if "text_config" in fields else fields
    if text is not fields:
        if _plain(text.text("model_type")) != _plain(kind):
            raise text.error("model_type", kind)
        text.values = {**text.values, "model_type": kind}
    text.fill(rms_norm_eps=1e-5)
    config = decoder(text)
    fields.fields("vision_config").require_equal("out_hidden_size", config.hidden_size, "hidden_size of the decoder")
    return seeing(fields, text, config, vision, SECTIONS)


def _plain(model_type: str) -> str:
    """Return a model type in lower case without underscores, so that all spellings are equal: transformers 4 writes `Glm4vMoe_text`."""
    return model_type.lower().replace("_", "")


def _read_text(text: Fields) -> ModelConfig:
    text.fill(partial_rotary_factor=1.0, max_position_embeddings=32_768)
    text.fill(head_dim=text.integer("hidden_size") // text.integer("num_attention_heads"))
    return glm.read(text)


def _read_vision(fields: Fields, image_token: int) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    edge, rest = divmod(inner.integer("image_size"), inner.integer("patch_size"))
    if not edge or rest:
        raise inner.error("image_size", f"a multiple of patch_size ({inner.integer('patch_size')})")
    return read_like_qwen(
        fields,
        Tower.GLM4V,
        ENCODER,
        replace(QWEN_NAMES, norm_eps="rms_norm_eps"),
        image_token=image_token,
        intermediate_size=inner.integer("out_hidden_size"),  # the MLP of a layer is as wide as the decoder's vectors
        connector_size=inner.integer("intermediate_size"),
        qkv_bias=inner.flag("attention_bias", False),
        cutting=GLM,
        table_edge=edge,
    )


FAMILY = DecoderFamily(("glm4v", "glm46v", "glm4v_text"), read, glm4.layer)
