"""EXAONE 3 and 3.5: Llama with other names of fields and tensors."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_decoder, rotating_whole_heads
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.rope import read_rope

RENAMED = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}


def read(fields: Fields) -> ModelConfig:
    if "num_layers" in fields:
        fields.fill(num_hidden_layers=fields.integer("num_layers", maximum=10_000))
    eps = fields.number("layer_norm_epsilon", 1e-5)
    fields.fill(rms_norm_eps=eps, hidden_act=fields.text("activation_function", "silu"))
    config = rotating_whole_heads(read_decoder(fields))
    return replace(config, rope=read_rope(fields, config.head_dim, theta=500_000.0))


GGUF = Gguf("exaone")
FAMILY = DecoderFamily(("exaone",), read, llama.layer, gguf=GGUF, renamed=RENAMED)
