"""Gemma 2: a norm before and one behind each branch; soft caps, alternating windows, scaled embeddings."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
