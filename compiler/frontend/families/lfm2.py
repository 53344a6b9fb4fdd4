"""LFM2: gated short convolutions in most layers, attention with a norm of each query head and each key head in all other layers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_kinds, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import read_attending, taps
from compiler.frontend.layers.decoder import Layer, attend, gated_mlp, head_norm, pre_norm, project_qkv, rotate
from compiler.frontend.layers.states import convolution
from compiler.frontend.recurrence import ShortConvolution
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import MULTIPLY

NORMS = ("operator_norm", "ffn_norm")
KINDS = ("conv", "full_attention")


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=12288)
    config = read_hybrid(fields)
    return replace(config, intermediate_size=_read_width(fields, fields.integer("block_ff_dim", config.intermediate_size)))


def read_hybrid(fields: Fields) -> ModelConfig:
    """Read the fields that LFM2 and LFM2 with experts have in common. Return the `intermediate_size` of the file unchanged."""
    theta = fields.number("theta", 1e6)
    fields.fill(tie_word_embeddings=True, num_key_value_heads=8, max_position_embeddings=128_000, rope_theta=theta)
    fields.require_equal("theta", fields.number("rope_theta"), "rope_theta")  # `theta` is the original name of rope_theta
    # These fields of the original code repeat other fields, concern initial weights, or have the same value in all models.
    fields.skip(
        "conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_use_swiglu", "block_use_xavier_init", "block_norm_eps"
    )
    fields.skip("block_mlp_init_scale", "block_out_init_scale", "num_heads", "use_pos_enc")
    fields.require("because biases of convolutions are not supported", conv_bias=False)
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, eps_field="norm_eps"))
    return replace(
        config,
        tie_word_embeddings=fields.flag("tie_embedding", config.tie_word_embeddings),  # tie_embedding, the original name, takes precedence
        convolution=ShortConvolution(_read_layers(fields, config.num_layers), fields.integer("conv_L_cache", 3, minimum=2, maximum=64)),
    )


def _read_width(fields: Fields, width: int) -> int:
    """Return the intermediate size: two thirds of `width`, times block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of.
    If block_auto_adjust_ff_dim is false, the size is `width` itself."""
    multiple, factor = fields.integer("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _read_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that have a convolution. The field `layer_types` overrides the older `full_attn_idxs`; without both, all layers
    have attention. Raise ConfigError if one of these fields is malformed."""
    attends = fields.raw("full_attn_idxs", list(range(num_layers)))
    if not isinstance(attends, list) or any(type(layer) is not int or not 0 <= layer < num_layers for layer in attends):
        raise fields.error("full_attn_idxs", f"a list of layers from 0 to {num_layers - 1}")
    kinds = read_kinds(fields, [KINDS[layer in attends] for layer in range(num_layers)], KINDS)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv")


def mix(at: Layer, h: Var) -> Var:
    return _convolve(at, h) if at.number in at.step.config.stateful else _attend(at, h)


def _attend(at: Layer, h: Var) -> Var:
    q, k, v = project_qkv(at, h)
    q, k = head_norm(at, q, "self_attn.q_layernorm"), head_norm(at, k, "self_attn.k_layernorm")
    return attend(at, rotate(at, q), rotate(at, k), v, "self_attn.out_proj")


def _convolve(at: Layer, h: Var) -> Var:
    """Multiply the input by a gate, apply the convolution, multiply its result by another gate, and project."""
    net, size, found = at.step.net, at.step.config.hidden_size, at.step.config.convolution
    assert found is not None, at.step.config
    wide = net.linear(h, at.name("conv.in_proj"), size, 3 * size)
    before, behind, x = (net.slice(wide, 1, part * size, (part + 1) * size) for part in range(3))
    mixed = convolution(at, net.call(MULTIPLY, before, x), "conv.conv", size, found.taps)
    return net.linear(net.call(MULTIPLY, behind, mixed), at.name("conv.out_proj"), size, size)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    complete_hybrid(config)
    config["block_auto_adjust_ff_dim"] = False  # GGUF files state the final intermediate size


def complete_hybrid(config: dict[str, Any]) -> None:
    """Add the kind of each layer, if the metadata states the number of key heads per layer. A layer without key heads has a convolution."""
    if (attending := read_attending(config)) is not None:
        config["layer_types"] = [KINDS[attends] for attends in attending]


GGUF = Gguf(
    "lfm2",
    {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    {
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    {"token_embd_norm": "model.embedding_norm"},
    restored={"conv.conv.weight": taps},
    complete=complete,
)
dense = partial(gated_mlp, names=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2")
layer = pre_norm(mix, dense, NORMS)
FAMILY = DecoderFamily(("lfm2",), read, layer, last_norm="embedding_norm", gguf=GGUF)
