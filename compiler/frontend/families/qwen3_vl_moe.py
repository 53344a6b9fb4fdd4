"""Qwen3-VL with mixtures of experts: its decoder is that of Qwen3-MoE. Checkpoints stack the experts."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import qwen3_moe, qwen3_vl
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def read(fields: Fields) -> ModelConfig:
    return qwen3_vl.read_seeing(fields, "qwen3_vl_moe_text", _read_text)


def _read_text(fields: Fields) -> ModelConfig:
    fields.fill(norm_topk_prob=True)
    return qwen3_moe.read(fields)


FAMILY = DecoderFamily(
    ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    read,
    qwen3_moe.layer,
    gguf=Gguf("qwen3vlmoe", complete=qwen3_moe.complete),
    experts=replace(qwen3_moe.NAMES, stacked=STACKED, halves=True, inputs_first=True),
)
