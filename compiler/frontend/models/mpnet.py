"""MPNet: no segments, and a bias on attention by distance."""

from compiler.frontend.encoder import EncoderWiring

WIRING = EncoderWiring(
    prefix="mpnet.",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
