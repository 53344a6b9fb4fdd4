"""GLM-4 of 2025: GLM with a norm before and after attention and the MLP."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.families import glm
from compiler.frontend.family import DecoderFamily
from compiler.frontend.layers.decoder import attention, sandwiched

NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


GGUF_LAYER_NAMES = {"post_attention_norm": NORMS[1], "ffn_norm": NORMS[2], "post_ffw_norm": NORMS[3], "ffn_up": "mlp.gate_up_proj"}
layer = sandwiched(attention, glm.stacked_mlp, NORMS)
# GGUF files of GLM-4.1V have the key rope.dimension_sections, since their rope has a section per coordinate of image tokens.
GGUF = replace(glm.GGUF, architecture="glm4", layer_names=GGUF_LAYER_NAMES, halves_mark="rope.dimension_sections")
FAMILY = DecoderFamily(("glm4",), glm.read, layer, gguf=GGUF)
