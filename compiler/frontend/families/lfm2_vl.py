"""LFM2-VL: its decoder is LFM2. Images are not read."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import lfm2
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    # The head belongs to the outer model, whatever the fields of the decoder say.
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    text = text_fields(fields, {"model_type": "lfm2"})
    if text.text("model_type") != "lfm2":
        raise text.error("model_type", "lfm2")
    return replace(lfm2.read(text), tie_word_embeddings=is_tied)


FAMILY = DecoderFamily(("lfm2_vl",), read, lfm2.layer, last_norm=lfm2.FAMILY.last_norm)
