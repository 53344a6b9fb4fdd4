"""OLMo 2: norms only after attention and the MLP. One norm covers all query heads together, and another covers all key heads."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attend, post_norm, project_qkv, projection_norm, rotate
from compiler.ir.graph.atoms import Var

GGUF_LAYER_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def read(fields: Fields) -> ModelConfig:
    return rotating_whole_heads(read_decoder(fields, eps=1e-5, bias="attention_bias"))


def attention(at: Layer, h: Var) -> Var:
    c = at.step.config
    q, k, v = project_qkv(at, h)
    q = projection_norm(at, q, "self_attn.q_norm", c.num_heads)
    k = projection_norm(at, k, "self_attn.k_norm", c.num_kv_heads)
    return attend(at, rotate(at, q), rotate(at, k), v)


layer = post_norm(attention)
GGUF = Gguf("olmo2", layer_names=GGUF_LAYER_NAMES, biases={"attention_bias": "attn_output"})
FAMILY = DecoderFamily(("olmo2",), read, layer, gguf=GGUF)
