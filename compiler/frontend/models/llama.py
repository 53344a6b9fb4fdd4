"""Llama 1 to 3.x: the plain decoder."""

from compiler.frontend.decoder import Wiring

WIRING = Wiring()
