"""Mistral Small 3.1 and Ministral 3 as multimodal models: the encoder of Pixtral, a connector that merges neighbouring patches, and the
decoder of Mistral or Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_activation, text_fields
from compiler.frontend.cutting import CAPPED
from compiler.frontend.families import llama, ministral3, mistral
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.towers import check_tokens, read_merge, read_pixtral
from compiler.frontend.vision import Vision

DECODERS = {"mistral": mistral.read, "ministral3": ministral3.read}
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # older and newer name of the field for the id of the image token


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields) if "vision_config" in fields else None
    text = text_fields(fields, {"model_type": "mistral"})
    if (found := DECODERS.get(text.text("model_type"))) is None:
        raise text.error("model_type", f"one of {', '.join(DECODERS)}")
    config = found(text)
    if vision is None:
        return config
    check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    return replace(config, vision=vision)


def _read_vision(fields: Fields) -> Vision:
    return read_pixtral(
        fields,
        merge=read_merge(fields, "spatial_merge_size", 2),
        image_token=fields.integer(IMAGE_TOKENS[0], fields.integer(IMAGE_TOKENS[1], 10, minimum=0), minimum=0),
        cutting=CAPPED,
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        connector_bias=fields.flag("multimodal_projector_bias", False),
        connector_norm=True,
        is_optional=True,
    )


FAMILY = DecoderFamily(("mistral3",), read, llama.layer)
