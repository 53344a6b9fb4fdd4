"""Cohere 2 (Command R7B, Command A): parallel branches, layer norms without bias, and rotary positions only in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, Norm, read_decoder, read_windows, rotating_neighbours, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attention, gated_mlp, parallel
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    fields.fill(tie_word_embeddings=True)
    fields.skip("rotary_pct", "position_embedding_type", "order_of_interleaved_layers", "use_embedding_sharing", "use_parallel_block")
    # These fields of the original code have the same value in all models.
    fields.skip("use_parallel_embedding", "use_gated_activation", "layer_switch")
    config = rotating_whole_heads(rotating_neighbours(read_decoder(fields, eps=1e-5, eps_field="layer_norm_eps")))
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 4))
    windows = read_windows(fields, fields.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
    bias = fields.flag("attention_bias", False)
    return replace(
        config,
        norm=Norm.LAYER_WITHOUT_BIAS,
        windows=windows,
        unrotated=frozenset(layer for layer, window in enumerate(windows) if window is None),
        logit_scale=fields.number("logit_scale", 0.0625),
        qkv_bias=bias,
        output_bias=bias,
    )


def layer(at: Layer, x: Var) -> Var:
    return parallel(at, x, attention, gated_mlp)


GGUF_FIELDS = {"attention.sliding_window": "sliding_window", "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
FAMILY = DecoderFamily(("cohere2",), read, layer, gguf=Gguf("cohere2", GGUF_FIELDS))
