"""LFM2-VL: the encoder SigLIP 2 for images of any size, a connector that joins neighbouring patches and projects them by two matrices, and
the decoder LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation, text_fields
from compiler.frontend.cutting import MIXED
from compiler.frontend.families import lfm2
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.towers import COMMON, UNREAD, FieldNames, check_tokens, read_any_size, read_merge
from compiler.frontend.vision import Connector, Tower, Vision

ENCODER: Mapping[str, Any] = {**COMMON, "patch_size": 16, "num_patches": 256, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
IMAGE_TOKENS = ("image_token_id", "image_token_index")  # newer and older name of the field for the id of the image token


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields) if "vision_config" in fields else None
    # The outer fields decide whether the head is tied, whatever the fields of the decoder say.
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    text = text_fields(fields, {"model_type": "lfm2"})
    if text.text("model_type") != "lfm2":
        raise text.error("model_type", "lfm2")
    config = replace(lfm2.read(text), tie_word_embeddings=is_tied, vision=vision)
    if vision is not None:
        check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    return config


def _read_vision(fields: Fields) -> Vision:
    fields.require(use_image_special_tokens=True)
    return read_naflex(
        fields,
        connector=Connector.PERCEPTRON,
        merge=read_merge(fields, "downsample_factor", 2),
        image_token=fields.integer(next((name for name in IMAGE_TOKENS if name in fields), IMAGE_TOKENS[0]), 396, minimum=0),
        cutting=MIXED,
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        connector_bias=fields.flag("projector_bias", True),
        connector_norm=fields.flag("projector_use_layernorm", True),
        connector_size=fields.integer("projector_hidden_size", 2560),
        around=("<|image_start|>", "<|image_end|>"),
        is_optional=True,
    )


def read_naflex(fields: Fields, **others: Any) -> Vision:
    """Return the configuration of the encoder SigLIP 2 for images of any size (NaFlex). `others` are the fields of Vision that the family
    or the connector determines. Raise ConfigError if the number of positions (`num_patches`) is not a square."""
    inner = fields.fields("vision_config", ENCODER)
    inner.skip(*UNREAD, "attention_dropout")
    if (edge := isqrt(inner.integer("num_patches"))) ** 2 != inner.integer("num_patches"):
        raise inner.error("num_patches", "the square of an integer, since the table of positions is a square")
    return read_any_size(inner, Tower.SIGLIP2, ENCODER, FieldNames(), rotates=False, table_edge=edge, **others)


FAMILY = DecoderFamily(("lfm2_vl", "lfm2-vl"), read, lfm2.layer, last_norm=lfm2.FAMILY.last_norm)
