"""Qwen3: Llama with norms of single query and key heads."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.families.qwen2 import read_qwen_windows
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, gated_mlp, head_norm_attention, norm
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = rotating_whole_heads(read_decoder(fields, default_head_dim=128))
    return replace(config, qkv_bias=bias, output_bias=bias, windows=read_qwen_windows(fields))


def layer(at: Layer, x: Var) -> Var:
    net = at.step.net
    x = net.add(x, head_norm_attention(at, norm(at, x, "input_layernorm")))
    return net.add(x, gated_mlp(at, norm(at, x, "post_attention_layernorm")))


FAMILY = DecoderFamily(("qwen3",), read, layer, gguf=Gguf("qwen3"))
