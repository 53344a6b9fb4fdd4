"""Llama 1 to 3.x: a norm before attention, a norm before the gated MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attention, gated_mlp, pre_norm
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = rotating_whole_heads(read_decoder(fields))
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(at, x, attention, gated_mlp)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """GGUF's metadata does not mention biases; the tensors show them."""
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors


FAMILY = DecoderFamily(("llama",), read, layer, gguf=Gguf("llama", pairs_interleaved=True, complete=complete))
