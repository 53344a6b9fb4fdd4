"""dots.llm1: a norm of each query head and each key head, a plain MLP in as many first layers as the configuration says, and mixtures of
experts with shared experts in all other layers. Layers from `max_window_layers` on may have a window."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.families import glm4_moe
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields


def read(fields: Fields) -> ModelConfig:
    if fields.text("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):  # published models state noaux_tc, the routing method
        raise fields.error("scoring_func", "sigmoid")
    fields.require(topk_method="noaux_tc", moe_layer_freq=1)
    fields.fill(first_k_dense_replace=0)
    config = rotating_whole_heads(read_decoder(fields, bias="attention_bias"))
    first = fields.integer("max_window_layers", 62, minimum=0)
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return replace(
        config,
        head_norms=True,
        windows=read_windows(fields, window, lambda layer: layer >= first),
        mixture=glm4_moe.read_shared_mixture(fields),
    )


GGUF = Gguf("dots1", glm4_moe.GGUF_FIELDS, biases={"attention_bias": "attn_q"})
FAMILY = DecoderFamily(("dots1",), read, glm4_moe.layer, gguf=GGUF, experts=glm4_moe.NAMES)
