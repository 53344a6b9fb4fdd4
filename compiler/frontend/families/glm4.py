"""GLM-4 of 2025: GLM with each branch between two norms."""

from __future__ import annotations

from compiler.frontend.families import glm
from compiler.frontend.family import DecoderFamily
from compiler.frontend.layers.decoder import Layer, attention, sandwiched
from compiler.ir.graph.atoms import Var

NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def layer(at: Layer, x: Var) -> Var:
    return sandwiched(at, x, attention, glm.stacked_mlp, NORMS)


FAMILY = DecoderFamily(("glm4",), glm.read, layer)
