"""GLM-4.5V and GLM-4.6V: the encoder of images of GLM-4.1V, and the decoder of GLM-4.5, which has mixtures of experts."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import glm4_moe, glm4v
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

IMAGE_TOKEN_ID = 151_363


def read(fields: Fields) -> ModelConfig:
    return glm4v.read_seeing(fields, "glm4v_moe_text", _read_text, IMAGE_TOKEN_ID)


def _read_text(text: Fields) -> ModelConfig:
    text.fill(attention_bias=True, max_position_embeddings=65_536)
    return glm4_moe.read(text)


FAMILY = DecoderFamily(("glm4v_moe", "glm4v_moe_text"), read, glm4_moe.layer, experts=glm4_moe.NAMES)
