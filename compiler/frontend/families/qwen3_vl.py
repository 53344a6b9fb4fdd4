"""Qwen3-VL: its decoder is Qwen3. Images are not read."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import qwen3
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    if "text_config" in fields:
        fields = text_fields(fields, {"model_type": "qwen3_vl_text"})
    fields.fill(rope_theta=500_000.0)
    return qwen3.read(fields)


FAMILY = DecoderFamily(("qwen3_vl", "qwen3_vl_text"), read, qwen3.layer, gguf=Gguf("qwen3vl"))
