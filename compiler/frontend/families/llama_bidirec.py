"""Decoders whose tokens attend to their whole text, for embeddings: NVIDIA's models of the type llama_bidirec, and models such as
gte-Qwen2, whose config.json has the type of a decoder and `is_causal: false`."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.classes import read_classes
from compiler.frontend.config import EncoderConfig, ModelConfig
from compiler.frontend.families import llama, qwen2, qwen3
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, Stem, attend, gated_mlp, head_norm, norm, project, rotate
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.graph.atoms import Var

NAME = "llama_bidirec"
CAUSAL = {"llama": llama.read, "qwen2": qwen2.read, "qwen3": qwen3.read}  # type of a decoder with `is_causal: false` -> reader
POOLINGS = {"avg": Pooling.MEAN, "cls": Pooling.CLS, "last": Pooling.LAST}  # name in NVIDIA's models -> pooling


def read(fields: Fields) -> ModelConfig:
    kind = fields.text("model_type")
    config = CAUSAL.get(kind, llama.read)(fields)
    if any(config.windows):
        raise fields.error("use_sliding_window", "false, because windows are supported in causal attention only")
    if read_classes(fields) is not None:
        raise fields.error("architectures", "no classification head, because attention is bidirectional")
    return replace(
        config,
        family=NAME,
        encoder=EncoderConfig(0, 0, 0),
        head_norms=kind == "qwen3",
        embedding=EmbeddingConfig(_read_pooling(fields) if kind == NAME else Pooling.LAST, True),
    )


def _read_pooling(fields: Fields) -> Pooling:
    found = POOLINGS.get(fields.text("pooling", "avg"))
    if found is None:
        raise fields.error("pooling", f"one of {', '.join(POOLINGS)}")
    return found


def embed(at: Stem) -> Var:
    return at.net.embedding(f"{at.prefix}embed_tokens", at.texts.tokens, at.config.vocab_size, at.config.hidden_size)


def layer(at: EncoderLayer, x: Var) -> Var:
    x = at.net.add(x, _attention(at, norm(at, x, "input_layernorm")))
    return at.net.add(x, gated_mlp(at, norm(at, x, "post_attention_layernorm"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))


def _attention(at: EncoderLayer, h: Var) -> Var:
    q, k = project(at, h, "self_attn.q_proj"), project(at, h, "self_attn.k_proj", at.config.num_kv_heads)
    if at.config.head_norms:
        q, k = head_norm(at, q, "self_attn.q_norm"), head_norm(at, k, "self_attn.k_norm")
    v = project(at, h, "self_attn.v_proj", at.config.num_kv_heads)
    return attend(at, rotate(at, q), rotate(at, k), v, "self_attn.o_proj")


FAMILY = EncoderFamily(
    (NAME,), read, layer, None, prefix="model.", embed=embed, layers="layers", last_norm="norm", both_ways=frozenset(CAUSAL)
)
