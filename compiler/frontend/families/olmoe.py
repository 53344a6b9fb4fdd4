"""OLMoE: a mixture of experts in every layer, one norm over all query heads together, one over all key heads, and optional clipping of
queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attend, pre_norm, project_qkv, projection_norm, rotate
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, read_mixture
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ops.elementwise import CLIP

NAMES = ExpertNames()


def read(fields: Fields) -> ModelConfig:
    fields.fill(num_experts=64, num_experts_per_tok=8, max_position_embeddings=4096)
    return replace(
        rotating_whole_heads(read_decoder(fields, eps=1e-5, bias="attention_bias")),
        qkv_limit=fields.number("clip_qkv", None),
        mixture=read_mixture(fields, "num_experts", "intermediate_size"),
    )


def attention(at: Layer, h: Var) -> Var:
    c = at.step.config
    q, k, v = project_qkv(at, h)
    q = projection_norm(at, q, "self_attn.q_norm", c.num_heads)
    k = projection_norm(at, k, "self_attn.k_norm", c.num_kv_heads)
    q, k, v = (clipped(at, x) for x in (q, k, v))
    return attend(at, rotate(at, q), rotate(at, k), v)


def clipped(at: Layer, x: Var) -> Var:
    limit = at.step.config.qkv_limit
    return x if limit is None else at.step.net.call(CLIP, x, ScalarValue(-limit, "f32"), ScalarValue(limit, "f32"))


FAMILY = DecoderFamily(
    ("olmoe",), read, pre_norm(attention, mixture(NAMES)), gguf=Gguf("olmoe", {"attention.clamp_kqv": "clip_qkv"}), experts=NAMES
)
