"""Qwen3-VL with mixtures of experts: its decoder is that of Qwen3-MoE. Checkpoints stack the experts. Images are not read."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import qwen3_moe
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def read(fields: Fields) -> ModelConfig:
    if "text_config" in fields:
        fields = text_fields(fields, {"model_type": "qwen3_vl_moe_text"})
    fields.fill(rope_theta=500_000.0, norm_topk_prob=True)
    return qwen3_moe.read(fields)


FAMILY = DecoderFamily(
    ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    read,
    qwen3_moe.layer,
    gguf=Gguf("qwen3vlmoe", complete=qwen3_moe.complete),
    experts=replace(qwen3_moe.NAMES, stacked=STACKED, halves=True, inputs_first=True),
)
