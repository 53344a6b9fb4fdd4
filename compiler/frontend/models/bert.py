"""BERT: the plain encoder."""

from compiler.frontend.encoder import EncoderWiring

WIRING = EncoderWiring(prefix="bert.")
