"""Mistral: Llama with sliding windows."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring()
