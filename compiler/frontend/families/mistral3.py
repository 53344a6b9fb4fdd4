"""Mistral Small 3.1 and Ministral 3 as multimodal models: the decoder is that of Mistral or Ministral 3. Images are not read."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import llama, ministral3, mistral
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

DECODERS = {"mistral": mistral.read, "ministral3": ministral3.read}


def read(fields: Fields) -> ModelConfig:
    text = text_fields(fields, {"model_type": "mistral"})
    if (found := DECODERS.get(text.text("model_type"))) is None:
        raise text.error("model_type", f"one of {', '.join(DECODERS)}")
    return found(text)


FAMILY = DecoderFamily(("mistral3",), read, llama.layer)
