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
from compiler.frontend.towers import COLOURS, COMMON, UNREAD, check_tokens
from compiler.frontend.vision import MOST_PATCHES, Connector, Tower, Vision

ENCODER: Mapping[str, Any] = {**COMMON, "patch_size": 16, "num_patches": 256, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
IMAGE_TOKENS = ("image_token_id", "image_token_index")  # names of the field in newer and older files


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields) if "vision_config" in fields else None
    # The head belongs to the outer model, whatever the fields of the decoder say.
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    text = text_fields(fields, {"model_type": "lfm2"})
    if text.text("model_type") != "lfm2":
        raise text.error("model_type", "lfm2")
    config = replace(lfm2.read(text), tie_word_embeddings=is_tied, vision=vision)
    if vision is not None:
        check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    return config


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    inner.skip(*UNREAD, "attention_dropout")
    size, heads, patch = (inner.integer(name) for name in ("hidden_size", "num_attention_heads", "patch_size"))
    if size % heads:
        raise inner.error("num_attention_heads", f"a divisor of hidden_size ({size})")
    if inner.integer("num_channels", COLOURS) != COLOURS:
        raise inner.error("num_channels", str(COLOURS))
    if (edge := isqrt(inner.integer("num_patches"))) ** 2 != inner.integer("num_patches"):
        raise inner.error("num_patches", "the square of an integer, since the table of positions is a square")
    if (merge := fields.integer("downsample_factor", 2)) ** 2 > MOST_PATCHES:
        raise fields.error("downsample_factor", f"at most {isqrt(MOST_PATCHES)}")
    if not fields.flag("use_image_special_tokens", True):
        raise fields.error("use_image_special_tokens", "true")
    return Vision(
        tower=Tower.SIGLIP2,
        crop_size=patch * merge,
        patch_size=patch,
        hidden_size=size,
        intermediate_size=inner.integer("intermediate_size"),
        num_layers=inner.integer("num_hidden_layers", maximum=1000),
        num_heads=heads,
        activation=read_activation(inner, "hidden_act", ENCODER["hidden_act"]),
        norm_eps=inner.number("layer_norm_eps"),
        connector=Connector.PERCEPTRON,
        merge=merge,
        image_token=fields.integer(next((name for name in IMAGE_TOKENS if name in fields), IMAGE_TOKENS[0]), 396, minimum=0),
        cutting=MIXED,
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        connector_bias=fields.flag("projector_bias", True),
        connector_norm=fields.flag("projector_use_layernorm", True),
        connector_size=fields.integer("projector_hidden_size", 2560),
        around=("<|image_start|>", "<|image_end|>"),
        table_edge=edge,
        is_optional=True,
    )


FAMILY = DecoderFamily(("lfm2_vl",), read, lfm2.layer, last_norm=lfm2.FAMILY.last_norm)
