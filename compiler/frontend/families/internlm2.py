"""InternLM 2 and 2.5: Llama with other names of tensors. One matrix stores, for each key head, the rows of the queries that use this key
head, then the rows of the key, and then those of the value."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attend, attention, gated_mlp, pre_norm, rotate
from compiler.ir.graph.atoms import Var

QKV = "self_attn.qkv_proj"
RENAMED = {
    "model.tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    ".attention_norm.": ".input_layernorm.",
    ".attention.wqkv.": f".{QKV}.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("bias", True)
    return replace(rotating_whole_heads(read_decoder(fields)), qkv_bias=bias, output_bias=bias)


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(attention if at.step.config.apart else _attention, gated_mlp)(at, x)


def _attention(at: Layer, h: Var) -> Var:
    """Attend with queries, keys and values that one matrix, `QKV`, projects. For each key head, the matrix has the rows of the group of
    queries, then those of the key, then those of the value."""
    net, t, c = at.step.net, at.step.t, at.step.config
    group = c.num_heads // c.num_kv_heads
    stacked = net.linear(h, at.name(QKV), c.hidden_size, c.num_kv_heads * (group + 2) * c.head_dim, bias=c.qkv_bias)
    groups = net.reshape(stacked, t, c.num_kv_heads, group + 2, c.head_dim)
    parts = (net.slice(groups, 2, begin, end) for begin, end in ((0, group), (group, group + 1), (group + 1, group + 2)))
    q, k, v = (net.reshape(part, t, heads, c.head_dim) for part, heads in zip(parts, (c.num_heads, *[c.num_kv_heads] * 2), strict=True))
    return attend(at, rotate(at, q), rotate(at, k), v)


def adapt(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    """Record that GGUF files store the matrices of queries, keys and values as separate tensors."""
    return replace(config, apart=True)


GGUF = Gguf("internlm2", biases={"bias": "attn_output"}, pairs_interleaved=True, adapt=adapt)
FAMILY = DecoderFamily(("internlm2",), read, layer, gguf=GGUF, renamed=RENAMED)
