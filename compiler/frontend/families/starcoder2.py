"""StarCoder2: layer norms, an MLP without a gate, biases on all projections unless `use_bias` is false, and optional windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compiler.frontend.config import ModelConfig, Norm, read_decoder, read_one_window, rotating_whole_heads
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import attention, mlp, pre_norm


def read(fields: Fields) -> ModelConfig:
    fields.fill(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, num_key_value_heads=2, max_position_embeddings=4096)
    # Fields of StarCoder, which transformers does not read for StarCoder2.
    fields.skip("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights")
    fields.skip("norm_type", "mlp_type", "layer_norm_epsilon")
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, eps_field="norm_epsilon"))
    bias = fields.flag("use_bias", True)
    windows = read_one_window(fields)
    return replace(config, norm=Norm.LAYER, qkv_bias=bias, output_bias=bias, mlp_bias=bias, windows=windows)


GGUF = Gguf(
    "starcoder2",
    fields={"attention.layer_norm_epsilon": "norm_epsilon"},
    layer_names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    biases={"use_bias": "attn_output"},
)
FAMILY = DecoderFamily(("starcoder2",), read, pre_norm(attention, partial(mlp, up="mlp.c_fc", down="mlp.c_proj")), gguf=GGUF)
