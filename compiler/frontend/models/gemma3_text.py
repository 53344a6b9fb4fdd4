"""Gemma 3 (text): Gemma 2 without soft caps, with norms on single heads and a rope of its own in local layers."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
