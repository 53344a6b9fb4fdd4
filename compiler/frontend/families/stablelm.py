"""StableLM: layer norms, a RoPE that rotates part of each head, and, in StableLM 2 12B, attention and MLP in parallel and a norm of each
query head and each key head."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from compiler.frontend.config import ModelConfig, Norm, read_decoder
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, gated_mlp, layer_norm_attention, parallel, pre_norm
from compiler.ir.graph.atoms import Var

QUERY_NORMS, KEY_NORMS = "self_attn.q_layernorm.norms", "self_attn.k_layernorm.norms"


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.25, max_position_embeddings=4096)
    return replace(
        read_decoder(fields, eps=1e-5, eps_field="layer_norm_eps"),
        norm=Norm.LAYER,
        qkv_bias=fields.flag("use_qkv_bias", False),
        head_norms=fields.flag("qk_layernorm", False),
        parallel=fields.flag("use_parallel_residual", False),
    )


def layer(at: Layer, x: Var) -> Var:
    apply = parallel if at.step.config.parallel else pre_norm
    return apply(partial(layer_norm_attention, norms=(QUERY_NORMS, KEY_NORMS)), gated_mlp)(at, x)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Derive from the tensors whether attention and MLP are parallel. The metadata may be wrong: if the original config.json omits
    `use_parallel_residual`, converters state that attention and MLP are parallel."""
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors


GGUF = Gguf(
    "stablelm",
    {"attention.layer_norm_epsilon": "layer_norm_eps"},
    {"attn_q_norm": QUERY_NORMS, "attn_k_norm": KEY_NORMS},
    biases={"use_qkv_bias": "attn_q"},
    query_norm="qk_layernorm",
    complete=complete,
)
FAMILY = DecoderFamily(("stablelm",), read, layer, joined=(f"{QUERY_NORMS}.*", f"{KEY_NORMS}.*"), gguf=GGUF)
