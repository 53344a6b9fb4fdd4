"""Qwen3: norms on the single heads of queries and keys."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
