"""Qwen2 and 2.5: Llama with biases on queries, keys and values."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring()
