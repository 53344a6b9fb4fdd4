"""Phi-3: Llama whose projections are stored stacked."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
