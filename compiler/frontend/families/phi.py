"""Phi-1, 1.5 and 2: attention and MLP in parallel, layer norms, biases on all projections, and a RoPE that rotates part of each head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compiler.frontend.config import ModelConfig, Norm, read_decoder
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, mlp, parallel


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.5, hidden_act="gelu_new")
    fields.require("because norms of queries and keys are not supported for phi", qk_layernorm=False)
    config = read_decoder(fields, eps=1e-5, eps_field="layer_norm_eps")
    assert config.rope is not None
    fields.require_equal("rotary_dim", config.rope.size, "head_dim * partial_rotary_factor")  # older files state the product
    return replace(config, norm=Norm.LAYER, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True)


GGUF = Gguf(
    "phi2",
    fields={"attention.layer_norm_epsilon": "layer_norm_eps"},
    layer_names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)
FAMILY = DecoderFamily(
    ("phi",),
    read,
    parallel(partial(attention, out="self_attn.dense"), partial(mlp, up="mlp.fc1", down="mlp.fc2")),
    last_norm="final_layernorm",
    gguf=GGUF,
)
