"""StableLM: Llama with layer norms, and with rotation of a part of each head."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, Norm, read_decoder
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.25)
    for name in ("use_parallel_residual", "qk_layernorm"):
        if fields.flag(name, False):
            raise fields.error(name, "false: the layers of StableLM 2 12B are not supported")
    config = read_decoder(fields, eps=1e-5, eps_field="layer_norm_eps")
    return replace(config, norm=Norm.LAYER, qkv_bias=fields.flag("use_qkv_bias", False))


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Read from the tensors whether the residual is parallel: converters state it in all models whose configuration omits the field."""
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors


GGUF = Gguf(
    "stablelm",
    {"attention.layer_norm_epsilon": "layer_norm_eps"},
    biases={"use_qkv_bias": "attn_q"},
    query_norm="qk_layernorm",
    complete=complete,
)
FAMILY = DecoderFamily(("stablelm",), read, llama.layer, gguf=GGUF)
