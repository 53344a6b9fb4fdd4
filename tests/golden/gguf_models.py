"""Converts golden models to GGUF files, with the `gguf` package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

from compiler.frontend.registry import load_config, weights_of
from compiler.frontend.weights import open_safetensors

MODELS = Path(__file__).parent / "models"
Fill = Callable[[gguf.GGUFWriter], object]
Values = Mapping[str, Any]  # fields of a config.json, with the nested fields of the decoder and of rope moved to the top level
ARCHITECTURES = {name: number for number, name in gguf.constants.MODEL_ARCH_NAMES.items()}
# Name of a method of the GGUF writer, without `add_` -> the config.json field that all converters pass to this method.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "rope_freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SCALING_FIELDS = {
    "rope_scaling_factor": "factor",
    "rope_scaling_orig_ctx_len": "original_max_position_embeddings",
    "rope_scaling_yarn_beta_fast": "beta_fast",
    "rope_scaling_yarn_beta_slow": "beta_slow",
    "rope_scaling_yarn_attn_factor": "attention_factor",
}


SCALES = {".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"}  # names of Gemma 4


@dataclass(frozen=True)
class Converter:
    """The ways in which the converter of one architecture differs from the others."""

    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, Callable[[Values], Any]] = field(default_factory=dict[str, Callable[[Values], Any]])
    omits: tuple[str, ...] = ()
    permutes: bool = False  # whether the converter permutes the rows of queries and keys
    joins_experts: bool = False  # whether the converter writes gate and up projections of experts as one tensor
    tiles: bool = False  # whether the converter reorders the value heads of the gated delta rule
    norm_shift: float = 0.0
    # `changes` changes the tensors of one architecture before the changes that several converters make.
    changes: Callable[[dict[str, np.ndarray], Values], dict[str, np.ndarray]] = lambda tensors, values: tensors


def head_dim(values: Values) -> int:
    return values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])


def rotated(share: float) -> Callable[[Values], int]:
    return lambda values: int(values.get("partial_rotary_factor", share) * head_dim(values))


def stretched_base(values: Values) -> float:
    return values["rope_theta"] * values["alpha"] ** (head_dim(values) / (head_dim(values) - 2))


def local_layers(values: Values) -> list[bool] | None:
    """Return for each layer whether it has a window, or None if no layer has one."""
    if values.get("sliding_window") is None:
        return None
    return [(layer + 1) % values.get("sliding_window_pattern", 4) != 0 for layer in range(values["num_hidden_layers"])]


def whole_period(values: Values) -> int:
    return values["layer_types"].index("full_attention") + 1


def sliding(values: Values) -> list[bool]:
    return [kind == "sliding_attention" for kind in values["layer_types"]]


def kv_heads(values: Values) -> int | list[int]:
    own, others = values["num_key_value_heads"], values.get("num_global_key_value_heads")
    return own if others is None else [own if has_window else others for has_window in sliding(values)]


def widths(values: Values) -> int | list[int]:
    size, own = values["intermediate_size"], values["num_hidden_layers"] - values.get("num_kv_shared_layers", 0)
    return [size if n < own else 2 * size for n in range(values["num_hidden_layers"])] if values.get("use_double_wide_mlp") else size


def quantile(share: float) -> float:
    return NormalDist().inv_cdf(share) if share else -math.inf


def kv_heads_of_attention(values: Values) -> list[int]:
    return [values["num_key_value_heads"] * (kind in ("attention", "full_attention")) for kind in layer_kinds(values)]


def layer_kinds(values: Values) -> list[str]:
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    return values.get("layer_types") or [letters[letter] for letter in values["hybrid_override_pattern"]]


def inner_size(values: Values) -> int:
    heads, size = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"))["mamba_head_dim" in values]
    return values[heads] * values[size]


def short_width(values: Values) -> int:
    """Return the width of the MLP of LFM2."""
    multiple, size = values["block_multiple_of"], int(2 * values["block_ff_dim"] / 3)
    return multiple * -(-size // multiple)


def mixed_widths(values: Values) -> list[int]:
    sizes = {"mlp": values["intermediate_size"], "moe": values["moe_intermediate_size"]}
    return [sizes.get(kind, 0) for kind in layer_kinds(values)]


LATENT_VALUES: dict[str, Callable[[Values], Any]] = {
    "head_count_kv": lambda _: 1,
    "key_length": lambda values: values["kv_lora_rank"] + values["qk_rope_head_dim"],
    "value_length": lambda values: values["kv_lora_rank"],
    "key_length_mla": lambda values: values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
    "value_length_mla": lambda values: values["v_head_dim"],
    "rope_dimension_count": lambda values: values["qk_rope_head_dim"],
    "expert_weights_norm": lambda values: values["norm_topk_prob"] or None,
    "rope_scaling_yarn_log_mul": lambda values: 0.1 * values["mscale_all_dim"] if "mscale_all_dim" in values else None,
}


def with_padded_inputs(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Pad the table of per-layer embeddings of Gemma 3n to the vocabulary."""
    name = "model.embed_tokens_per_layer.weight"
    return {**tensors, name: np.pad(tensors[name], ((0, values["vocab_size"] - len(tensors[name])), (0, 0)))}


def with_stacked_streams(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the projections of Gemma 3n that make residual streams, and those that join them."""
    stacks = ("altup_projections", "altup_unembed_projections")
    found = {name: tensor for name, tensor in tensors.items() if not any(stack in name for stack in stacks)}
    return found | {f"model.{s}.weight": np.stack([tensors[f"model.{s}.{number}.weight"] for number in range(3)]) for s in stacks}


def with_split_gates(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Split the stacked projection of the MLP of Granite 4. The names of its tensors depend on whether the model has experts."""
    end = "_shexp" if values["num_local_experts"] else ""
    found = {}
    for name, tensor in tensors.items():
        layer, is_mlp, part = name.partition(".shared_mlp.")
        layer = f"blk.{layer.rpartition('.')[2]}"
        if not is_mlp:
            found[name] = tensor
        elif part == "input_linear.weight":
            found[f"{layer}.ffn_gate{end}.weight"], found[f"{layer}.ffn_up{end}.weight"] = np.split(tensor, 2)
        else:
            found[f"{layer}.ffn_down{end}.weight"] = tensor
    return found


def with_factors(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Multiply the weights of Falcon-H1 by the factors of their branches."""
    incoming, gate = values["attention_in_multiplier"], values["mlp_multipliers"]
    keys = values["mamba_n_groups"] * values["mamba_d_state"]
    each = np.repeat(values["ssm_multipliers"], [inner_size(values)] * 2 + [keys] * 2 + [values["mamba_n_heads"]])
    factors: dict[str, Any] = {
        "feed_forward.down_proj.weight": gate[1],
        "feed_forward.gate_proj.weight": gate[0],
        "self_attn.k_proj.weight": values["key_multiplier"] * incoming,
        "self_attn.q_proj.weight": incoming,
        "self_attn.v_proj.weight": incoming,
        "self_attn.o_proj.weight": values["attention_out_multiplier"],
        "mamba.in_proj.weight": values["ssm_in_multiplier"] * each[:, None].astype(np.float32),
        "mamba.out_proj.weight": values["ssm_out_multiplier"],
        "lm_head.weight": values["lm_head_multiplier"],
        "model.embed_tokens.weight": values["embedding_multiplier"],
    }
    found = dict(tensors)
    for name, tensor in tensors.items():
        if (factor := next((factor for end, factor in factors.items() if name.endswith(end)), None)) is not None:
            found[name] = (tensor * factor).astype(np.float32)
    return found


def with_split_projections(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Stack queries, keys and values of the gated delta rule of all heads, and take the gates out of the stack."""
    keys, key, value = values["linear_num_key_heads"], values["linear_key_head_dim"], values["linear_value_head_dim"]
    each, found = values["linear_num_value_heads"] // keys * value, {}
    for name, tensor in tensors.items():
        layer, is_stacked, _ = name.partition(".linear_attn.in_proj_qkvz.")
        if not is_stacked:
            found[name] = tensor
            continue
        by_key = tensor.reshape(keys, -1, tensor.shape[-1])
        *parts, gates = (part.reshape(-1, tensor.shape[-1]) for part in np.split(by_key, [key, 2 * key, 2 * key + each], axis=1))
        found[f"blk.{layer.rpartition('.')[2]}.attn_qkv.weight"] = np.concatenate(parts)
        found[f"blk.{layer.rpartition('.')[2]}.attn_gate.weight"] = gates
    return found


def with_split_groups(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Split the matrix of InternLM 2 that has for each key head its queries, the key and the value."""
    found, groups, size = {}, values["num_key_value_heads"], head_dim(values)
    for name, tensor in tensors.items():
        if ".qkv_proj." not in name:
            found[name] = tensor
            continue
        rows = tensor.reshape(groups, -1, size, *tensor.shape[1:])
        for part, of_group in zip(("q_proj", "k_proj", "v_proj"), np.split(rows, (-2, -1), axis=1), strict=True):
            found[name.replace("qkv_proj", part)] = of_group.reshape(-1, *tensor.shape[1:])
    return found


def with_split_latents(tensors: dict[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Split the matrices that compute keys and values from latents, and transpose those of keys."""
    heads, found = values["num_attention_heads"], {}
    for name, tensor in tensors.items():
        if ".kv_b_proj." not in name:
            found[name] = tensor
            continue
        by_head = tensor.reshape(heads, -1, tensor.shape[-1])
        found[name.replace("kv_b_proj", "k_b_proj")] = by_head[:, : values["qk_nope_head_dim"]].swapaxes(1, 2)
        found[name.replace("kv_b_proj", "v_b_proj")] = by_head[:, values["qk_nope_head_dim"] :]
    return found


DELTA = {
    "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads",
}
DELTA_VALUES: dict[str, Callable[[Values], Any]] = {
    "ssm_inner_size": lambda values: values["linear_num_value_heads"] * values["linear_value_head_dim"],
    "rope_dimension_count": rotated(0.25),
}
MAMBA = {
    "ssm_conv_kernel": "mamba_d_conv",
    "ssm_state_size": "mamba_d_state",
    "ssm_group_count": "mamba_n_groups",
    "ssm_time_step_rank": "mamba_n_heads",
}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
GROUPED = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
GRANITE = {
    "attention_scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
QWEN35 = Converter(
    DELTA,
    {**DELTA_VALUES, "full_attention_interval": whole_period, "rope_dimension_sections": lambda _: [11, 11, 10, 0]},
    tiles=True,
    norm_shift=1.0,
)
WINDOW = {"sliding_window": "sliding_window"}
SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
LLAMA = Converter({"vocab_size": "vocab_size", "expert_count": "num_local_experts"}, {"rope_dimension_count": head_dim}, permutes=True)
CONVERTERS = {
    "llama": LLAMA,
    "arcee": LLAMA,
    "smollm3": LLAMA,
    "granite": Converter(GRANITE, LLAMA.values, permutes=True),
    "minicpm": Converter(
        {"embedding_scale": "scale_emb"},
        {
            **LLAMA.values,
            "residual_scale": lambda values: values["scale_depth"] / values["num_hidden_layers"] ** 0.5,
            "logit_scale": lambda values: values["hidden_size"] / values["dim_model_base"],
        },
        permutes=True,
    ),
    "granitemoe": Converter({**GRANITE, "expert_count": "num_local_experts"}, LLAMA.values, permutes=True),
    "granitehybrid": Converter(
        {
            **GRANITE,
            **MAMBA,
            "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        {
            **LLAMA.values,
            "ssm_inner_size": inner_size,
            "head_count_kv": kv_heads_of_attention,
            "rope_scaling_finetuned": lambda values: values["position_embedding_type"] == "rope",
        },
        permutes=True,
        changes=with_split_gates,
    ),
    "falcon-h1": Converter(MAMBA, {"ssm_inner_size": inner_size, "key_length": head_dim, "value_length": head_dim}, changes=with_factors),
    "nemotron_h_moe": Converter(
        {
            **GROUPED,
            "layer_norm_eps": "layer_norm_epsilon",
            "ssm_conv_kernel": "conv_kernel",
            "ssm_state_size": "ssm_state_size",
            "ssm_group_count": "n_groups",
            "ssm_time_step_rank": "mamba_num_heads",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
            "moe_latent_size": "moe_latent_size",
        },
        {
            "block_count": lambda values: len(layer_kinds(values)),
            "ssm_inner_size": inner_size,
            "head_count_kv": kv_heads_of_attention,
            "feed_forward_length": mixed_widths,
            "rope_dimension_count": lambda values: values["hidden_size"] // values["num_attention_heads"],
        },
        permutes=True,
    ),
    "lfm2": Converter(
        {"layer_norm_rms_eps": "norm_eps", "shortconv_l_cache": "conv_L_cache", "vocab_size": "vocab_size"},
        {"head_count_kv": kv_heads_of_attention, "feed_forward_length": short_width},
    ),
    "lfm2moe": Converter(
        {
            "layer_norm_rms_eps": "norm_eps",
            "shortconv_l_cache": "conv_L_cache",
            "leading_dense_block_count": "num_dense_layers",
            "vocab_size": "vocab_size",
        },
        {"head_count_kv": kv_heads_of_attention, "expert_gating_func": lambda _: gguf.ExpertGatingFuncType.SIGMOID},
    ),
    "glm4moe": Converter(
        {**GROUPED, "expert_weights_norm": "norm_topk_prob"},
        {"rope_dimension_count": rotated(0.5), "expert_gating_func": lambda _: gguf.ExpertGatingFuncType.SIGMOID},
    ),
    "deepseek2": Converter(
        {**GROUPED, "vocab_size": "vocab_size", "kv_lora_rank": "kv_lora_rank", "q_lora_rank": "q_lora_rank"},
        LATENT_VALUES,
        changes=with_split_latents,
    ),
    "qwen3next": Converter(
        {**DELTA, **SHARED},
        {**DELTA_VALUES, "full_attention_interval": lambda values: values.get("full_attention_interval", 4)},
        norm_shift=1.0,
        changes=with_split_projections,
    ),
    "llama4": Converter(
        {
            "expert_count": "num_local_experts",
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
        },
        {**LLAMA.values, "interleave_moe_layer_step": lambda values: values.get("interleave_moe_layer_step", 1)},
    ),
    "gpt-oss": Converter({**WINDOW, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}),
    "mistral3": Converter(
        {"rope_scaling_yarn_log_mul": "mscale_all_dim", "attn_temperature_scale": "llama_4_scaling_beta"}, LLAMA.values, permutes=True
    ),
    "cohere2": Converter(
        {**WINDOW, "layer_norm_eps": "layer_norm_eps", "logit_scale": "logit_scale", "vocab_size": "vocab_size"},
        {"rope_dimension_count": head_dim, "rope_scaling_type": lambda _: gguf.RopeScalingType.NONE},
    ),
    "command-r": Converter(
        {"layer_norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"}, {"rope_scaling_type": lambda _: gguf.RopeScalingType.NONE}
    ),
    "internlm2": replace(LLAMA, changes=with_split_groups),
    "exaone4": Converter(WINDOW, {"sliding_window_pattern": local_layers}),
    "gemma": Converter(omits=("rope_freq_base",), norm_shift=1.0),
    "gemma2": Converter({**WINDOW, **SOFTCAPS}, omits=("rope_freq_base",), norm_shift=1.0),
    "gemma3": Converter(WINDOW, {"sliding_window_pattern": lambda values: values["sliding_window_pattern"]}, norm_shift=1.0),
    "chatglm": Converter(
        values={
            "context_length": lambda values: values["hidden_size"],
            "layer_norm_rms_eps": lambda _: 1e-5,
            "rope_freq_base": lambda _: 10000,
            "rope_dimension_count": rotated(0.5),
        },
        omits=("key_length", "value_length"),
    ),
    "glm4": Converter(values={"rope_dimension_count": rotated(0.5)}),
    "hunyuan-dense": Converter(
        values={
            "rope_freq_base": stretched_base,
            "rope_scaling_type": lambda _: gguf.RopeScalingType.NONE,
            "rope_scaling_factor": lambda _: 1,
            "rope_scaling_orig_ctx_len": lambda _: 1 << 18,
            "context_length": lambda _: 1 << 18,
        }
    ),
    "nemotron": Converter(
        {"layer_norm_eps": "norm_eps", "layer_norm_rms_eps": "norm_eps", "vocab_size": "vocab_size"},
        {"rope_dimension_count": rotated(0.5), "rope_scaling_type": lambda _: gguf.RopeScalingType.NONE},
        norm_shift=1.0,
    ),
    "olmo2": Converter(WINDOW, {"sliding_window_pattern": local_layers}),
    "olmoe": Converter({"clamp_kqv": "clip_qkv"}),
    "phi2": Converter({"layer_norm_eps": "layer_norm_eps"}, {"rope_dimension_count": rotated(0.5)}, omits=("rope_freq_base",)),
    "phi3": Converter(values={"sliding_window": lambda values: values["sliding_window"] or 0, "rope_dimension_count": rotated(1.0)}),
    "gemma4": Converter(
        {
            **WINDOW,
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
            "key_length": "global_head_dim",
            "value_length": "global_head_dim",
            "key_length_swa": "head_dim",
            "value_length_swa": "head_dim",
            "rope_dimension_count": "global_head_dim",
            "rope_dimension_count_swa": "head_dim",
        },
        {
            "sliding_window_pattern": sliding,
            "shared_kv_layers": lambda values: values.get("num_kv_shared_layers", 0),
            "embedding_length_per_layer_input": lambda values: values.get("hidden_size_per_layer_input", 0),
            "layer_norm_rms_eps": lambda _: 1e-6,
            "rope_freq_base": lambda values: values["rope_parameters"]["full_attention"]["rope_theta"],
            "rope_freq_base_swa": lambda values: values["rope_parameters"]["sliding_attention"]["rope_theta"],
            "head_count_kv": kv_heads,
            "feed_forward_length": widths,
        },
        joins_experts=True,
    ),
    "phimoe": Converter(
        {"expert_count": "num_local_experts"},
        {"sliding_window": lambda values: values.get("sliding_window") or 0, "rope_dimension_count": rotated(1.0)},
    ),
    "minimax-m2": Converter(
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size", "rope_dimension_count": "rotary_dim"}
    ),
    "dots1": Converter(
        {
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        }
    ),
    "gemma3n": Converter(
        {
            **WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_freq_base_swa": "rope_local_base_freq",
            "altup_active_idx": "altup_active_idx",
            "altup_num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "shared_kv_layers": "num_kv_shared_layers",
        },
        {
            "sliding_window_pattern": sliding,
            "activation_sparsity_scale": lambda values: [quantile(share) for share in values["activation_sparsity_pattern"]],
        },
        changes=lambda tensors, values: with_stacked_streams(with_padded_inputs(tensors, values)),
    ),
    "qwen35": QWEN35,
    "qwen35moe": replace(QWEN35, fields={**DELTA, **SHARED}),
    "qwen2vl": Converter({"rope_dimension_sections": "mrope_section"}),
    "qwen3vl": Converter({"rope_dimension_sections": "mrope_section"}, {"num_deepstack_layers": lambda _: 0}),
    "qwen3vlmoe": Converter({"rope_dimension_sections": "mrope_section"}, {"num_deepstack_layers": lambda _: 0}),
    "stablelm": Converter(
        {"layer_norm_eps": "layer_norm_eps"},
        {"rope_dimension_count": rotated(0.25), "parallel_residual": lambda values: values.get("use_parallel_residual", True)},
        omits=("rope_freq_base",),
        changes=lambda tensors, _: {name.replace("_layernorm.norms.", "_layernorm."): tensor for name, tensor in tensors.items()},
    ),
    "starcoder2": Converter({"layer_norm_eps": "norm_epsilon"}),
}
# Converters of 2024 and 2025, which left stacked projections as they were, and did not state the factors of MiniCPM.
OLDER = {
    "deepseek2": Converter(
        CONVERTERS["deepseek2"].fields,
        {
            "key_length": LATENT_VALUES["key_length_mla"],
            "value_length": LATENT_VALUES["value_length_mla"],
            **{name: LATENT_VALUES[name] for name in ("rope_dimension_count", "rope_scaling_yarn_log_mul")},
        },
    ),
    "minicpm": replace(CONVERTERS["minicpm"], fields={}, values=LLAMA.values),
    "qwen3next": replace(CONVERTERS["qwen3next"], changes=Converter().changes),
}


def write(path: Path, fill: Fill, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(tensor: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantise a tensor. The package cannot quantise to IQ4_NL, so its blocks are written here: a scale, and the nearest numbers of the
    table."""
    if kind is not gguf.GGMLQuantizationType.IQ4_NL:
        return gguf.quants.quantize(tensor, kind)
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    groups = tensor.astype(np.float32).reshape(*tensor.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype("<f2")
    steps = groups / np.maximum(scale.astype(np.float32), 1e-9)
    bits = np.abs(steps[..., None] - table).argmin(-1).astype(np.uint8)
    blocks = np.concatenate([scale.view(np.uint8), bits[..., :16] | bits[..., 16:] << 4], -1)
    return np.ascontiguousarray(blocks.reshape(*tensor.shape[:-1], -1))


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of queries and keys as the Llama converter does: within each head, rows of the first half alternate with rows of the
    second half."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


FORMER = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}  # names of fields -> their former names


def decoder_values(case: str) -> dict[str, Any]:
    values = json.loads((MODELS / case / "config.json").read_text())
    values |= values.get("text_config", {})
    values |= {name: values[former] for name, former in FORMER.items() if former in values}
    return {**(values.get("rope_parameters") or values.get("rope_scaling") or {}), **values}


DECODER = (
    *(f"model.{part}" for part in ("embed_tokens", "layers", "norm", "final_layernorm", "embedding_norm", "per_layer", "altup")),
    "backbone.",
    "lm_head",
)


def decoder_tensors(case: str) -> dict[str, np.ndarray]:
    """Return the f32 tensors of a golden model's decoder, with the names that a text-only model has."""
    source, found = weights_of(load_config(MODELS / case), open_safetensors(MODELS / case)), {}
    for name in source.tensors:
        plain = name.removeprefix("language_model.").replace("model.language_model.", "model.")
        if plain.startswith(DECODER):
            found[plain] = source.read(name).astype(np.float32)
    return found


def halved(tensor: np.ndarray, num_heads: int, num_rotated: int) -> np.ndarray:
    """Order rows as the converter of GLM-4V does: among the rotated rows of each head, those with even index come before those with odd
    index."""
    heads = tensor.reshape(num_heads, -1, *tensor.shape[1:])
    order = [*range(0, num_rotated, 2), *range(1, num_rotated, 2), *range(num_rotated, heads.shape[1])]
    return heads[:, order].reshape(tensor.shape)


def convert(
    case: str,
    arch: str,
    path: Path,
    add: Fill = lambda _: None,
    *,
    stacks_qkv: bool = False,
    kind: gguf.GGMLQuantizationType | None = None,
    num_ahead: int = 0,
    converters: Mapping[str, Converter] = CONVERTERS,
) -> Path:
    """Write a golden model as llama.cpp's converter would: in f32, or with matrices quantised to `kind`. `add` adds entries and tensors to
    the file. The file counts `num_ahead` layers that predict further tokens."""
    values, converter = decoder_values(case), converters.get(arch, Converter())

    def fill(writer: gguf.GGUFWriter) -> None:
        entries = {name: values.get(field) for name, field in {**FIELDS, **converter.fields}.items() if name not in converter.omits}
        entries |= {name: make(values) for name, make in converter.values.items()}
        entries["block_count"] += num_ahead
        if (scaled := values.get("rope_type", values.get("type"))) in ("linear", "yarn"):
            entries["rope_scaling_type"] = gguf.RopeScalingType(scaled)
            entries |= {name: values.get(field) for name, field in SCALING_FIELDS.items()}
        for name, value in entries.items():
            if value is not None:
                getattr(writer, f"add_{name}")(value)
        if scaled == "longrope":
            scaling = load_config(MODELS / case).rope.scaling
            writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
            writer.add_rope_scaling_attn_factors(scaling.attention_factors[1])
            writer.add_tensor("rope_factors_short.weight", np.array(scaling.short_factors, np.float32))
            writer.add_tensor("rope_factors_long.weight", np.array(scaling.long_factors, np.float32))
        num_layers = load_config(MODELS / case).num_layers
        names = gguf.get_tensor_name_map(ARCHITECTURES[arch], num_layers)
        # GGUF's tensor names in a model without experts
        dense = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH.LLAMA, num_layers)
        for name, tensor in converted_tensors(case, converter, stacks_qkv).items():
            own = names.get_name(name, try_suffixes=(".weight", ".bias")) or dense.get_name(name, try_suffixes=(".weight",))
            own = name if name.startswith("blk.") else own
            if (scale := next((scale for part, scale in SCALES.items() if name.endswith(part)), None)) is not None:
                writer.add_tensor(f"blk.{name.split('.')[2]}.{scale}", tensor)
                continue
            assert own is not None, name
            own = own if name.endswith((".weight", ".bias", ".A_log", ".D")) else f"{own}.weight"
            if kind is None or tensor.ndim < 2 or tensor.shape[-1] % 32:
                writer.add_tensor(own, tensor)
            else:
                writer.add_tensor(own, quantized(tensor, kind), raw_dtype=kind)
        if arch == "gemma4":  # divisors of the frequencies of layers without a window; pairs with huge divisors do not rotate
            pairs = values["global_head_dim"] // 2
            num_rotated = int(pairs * values["rope_parameters"]["full_attention"]["partial_rotary_factor"])
            writer.add_tensor("rope_freqs.weight", np.repeat(np.array([1, 1e30], np.float32), (num_rotated, pairs - num_rotated)))
        add(writer)

    return write(path, fill, arch)


def converted_tensors(case: str, converter: Converter, stacks_qkv: bool) -> dict[str, np.ndarray]:
    values = decoder_values(case)
    tensors = converter.changes(decoder_tensors(case), values)
    for name, tensor in tensors.items():
        if converter.permutes and ("q_proj" in name or "k_proj" in name):
            tensors[name] = interleaved(tensor, values["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] = tensor + np.float32(converter.norm_shift)
    if converter.tiles:
        tensors = with_tiled_heads(tensors, values)
    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    is_mamba = "ssm_inner_size" in converter.values and "linear_num_key_heads" not in values
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = -np.exp(tensor)
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            tensors[name] = tensor.squeeze(1)
        if is_mamba and name.endswith((".A_log", ".D")):
            tensors[name] = tensors[name][:, None]
        if is_mamba and name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            tensors[name] = tensor.reshape(values.get("mamba_n_groups", values.get("n_groups")), -1)
    for name in [name for name in tensors if ".experts.gate_proj" in name and converter.joins_experts]:
        both = [tensors.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both, axis=1)
    for name in [name for name in tensors if stacks_qkv and "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return tensors


def renamed(name: str) -> str:
    """Return the name that converters give to a parameter whose own name GGUF's table lacks."""
    name = name.replace("dt_bias", "dt_proj.bias" if ".mixer." not in name else "dt.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("expert_bias", "expert_bias.bias")
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.experts.\1_proj", name)
    name = re.sub(r"^model\.(layers\.\d+\.feed_forward\.experts\.w\d)", r"\1", name)
    return re.sub(r"^backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name)


def with_tiled_heads(tensors: Mapping[str, np.ndarray], values: Values) -> dict[str, np.ndarray]:
    """Order the value heads of the gated delta rule as the converter of Qwen3.5 does: first the first value head of each key head."""
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    size, others = values["linear_value_head_dim"], 2 * keys * values["linear_key_head_dim"]

    def tiled(tensor: np.ndarray, axis: int, each: int) -> np.ndarray:
        front, behind = tensor.shape[:axis], tensor.shape[axis + 1 :]
        by_key = tensor.reshape(*front, keys, heads // keys, each, *behind)
        return by_key.swapaxes(axis, axis + 1).reshape(tensor.shape)

    found = dict(tensors)
    for name, tensor in tensors.items():
        match name.partition("linear_attn.")[2]:
            case "in_proj_qkv.weight" | "conv1d.weight":
                found[name] = np.concatenate((tensor[:others], tiled(tensor[others:], 0, size)))
            case "in_proj_z.weight":
                found[name] = tiled(tensor, 0, size)
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                found[name] = tiled(tensor, 0, 1)
            case "out_proj.weight":
                found[name] = tiled(tensor, 1, size)
            case _:
                pass
    return found
