"""GLM-4 of 2024: Llama with biases on queries, keys and values. Its RoPE rotates half of each head, with adjacent dimensions as pairs, and
its MLP stores gate and up as one matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compiler.frontend.config import ModelConfig, read_decoder, rotating_neighbours
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, gated_mlp, pre_norm

stacked_mlp = partial(gated_mlp, names=("mlp.gate_up_proj",))


def read(fields: Fields) -> ModelConfig:
    fields.fill(partial_rotary_factor=0.5, num_key_value_heads=2, max_position_embeddings=131_072)
    config = rotating_neighbours(read_decoder(fields, eps=1.5625e-7, default_head_dim=128))
    return replace(config, qkv_bias=fields.flag("attention_bias", True))


# GGUF files of ChatGLM 3, which has the same layers, name this architecture, too.
GGUF = Gguf("chatglm", layer_names={"ffn_up": "mlp.gate_up_proj"}, biases={"attention_bias": "attn_q"})
FAMILY = DecoderFamily(("glm",), read, pre_norm(attention, stacked_mlp), gguf=GGUF)
