"""Qwen2-VL and Qwen2.5-VL: their decoder is Qwen2. Images are not read."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import llama, qwen2
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    if "text_config" in fields:
        fields = text_fields(fields, {"model_type": "qwen2_5_vl_text"})
    fields.skip("vision_config")  # fields of older files, which have the decoder's fields at the top level
    fields.fill(rms_norm_eps=1e-5, num_key_value_heads=8)
    return qwen2.read(fields)


FAMILY = DecoderFamily(("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"), read, llama.layer, gguf=Gguf("qwen2vl"))
