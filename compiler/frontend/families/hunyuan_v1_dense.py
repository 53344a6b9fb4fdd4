"""Hunyuan (dense): Llama with a norm of each query head and each key head. RoPE comes before these norms."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attend, gated_mlp, head_norm, pre_norm, project_qkv, rotate
from compiler.frontend.rope import DynamicScaling, Rope, read_rope, rope_fields
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    # Fields of the original code that select among variants; all models of the family have these values.
    fields.require(use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True, norm_type="rms")
    # Fields about other variants, special tokens, training and classification, and the precision of the head, which `--quantize` decides.
    fields.skip("cla_share_factor", "im_newline_id", "mask_init_id", "pad_id", "eod_token_id", "org_vocab_size", "enable_lm_head_fp32")
    fields.skip("class_num", "dense_list", "pool_type", "tokenizer_class")
    fields.fill(head_dim=fields.integer("attention_head_dim", None))
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, bias="attention_bias"))
    return replace(config, rope=_read_rope(fields, config.head_dim))


def _read_rope(fields: Fields, head_dim: int) -> Rope:
    """Read the rope. If a "dynamic" scaling has the field `alpha`, the rope has no scaling; instead, its base is multiplied once by a power
    of `alpha`, whatever the length of a sequence."""
    rope, scaling = read_rope(fields, head_dim), rope_fields(fields)
    if not isinstance(rope.scaling, DynamicScaling) or "alpha" not in scaling:
        return rope
    scaling.skip("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return Rope(rope.theta * scaling.number("alpha") ** (head_dim / (head_dim - 2)), head_dim)


def attention(at: Layer, h: Var) -> Var:
    q, k, v = project_qkv(at, h)
    q, k = (head_norm(at, rotate(at, x), f"self_attn.{name}_layernorm") for x, name in ((q, "query"), (k, "key")))
    return attend(at, q, k, v)


GGUF = Gguf(
    "hunyuan-dense",  # the rope base in GGUF files includes the scaling
    layer_names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    biases={"attention_bias": "attn_output"},
)
FAMILY = DecoderFamily(("hunyuan_v1_dense",), read, pre_norm(attention, gated_mlp), gguf=GGUF)
