"""Converts golden models to GGUF files, with the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
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


QWEN35 = Converter(
    {
        "ssm_conv_kernel": "linear_conv_kernel_dim",
        "ssm_state_size": "linear_key_head_dim",
        "ssm_group_count": "linear_num_key_heads",
        "ssm_time_step_rank": "linear_num_value_heads",
    },
    {
        "ssm_inner_size": lambda values: values["linear_num_value_heads"] * values["linear_value_head_dim"],
        "full_attention_interval": whole_period,
        "rope_dimension_count": rotated(0.25),
        "rope_dimension_sections": lambda _: [11, 11, 10, 0],
    },
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
    "granite": Converter(
        {
            "attention_scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        LLAMA.values,
        permutes=True,
    ),
    "gpt-oss": Converter({**WINDOW, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}),
    "mistral3": Converter(
        {"rope_scaling_yarn_log_mul": "mscale_all_dim", "attn_temperature_scale": "llama_4_scaling_beta"}, LLAMA.values, permutes=True
    ),
    "cohere2": Converter(
        {**WINDOW, "layer_norm_eps": "layer_norm_eps", "logit_scale": "logit_scale", "vocab_size": "vocab_size"},
        {"rope_dimension_count": head_dim, "rope_scaling_type": lambda _: gguf.RopeScalingType.NONE},
    ),
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
    "qwen35": QWEN35,
    "qwen35moe": replace(QWEN35, fields={**QWEN35.fields, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}),
    "qwen2vl": Converter({"rope_dimension_sections": "mrope_section"}),
    "qwen3vl": Converter({"rope_dimension_sections": "mrope_section"}, {"num_deepstack_layers": lambda _: 0}),
    "starcoder2": Converter({"layer_norm_eps": "norm_epsilon"}),
}


def write(path: Path, fill: Fill, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of queries and keys as the Llama converter does: within each head, rows of the first half alternate with rows of the
    second half."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


def decoder_values(case: str) -> dict[str, Any]:
    values = json.loads((MODELS / case / "config.json").read_text())
    values |= values.get("text_config", {})
    return {**(values.get("rope_parameters") or values.get("rope_scaling") or {}), **values}


def decoder_tensors(case: str) -> dict[str, np.ndarray]:
    """Return the f32 tensors of a golden model's decoder, with the names that a text-only model has."""
    source, found = weights_of(load_config(MODELS / case), open_safetensors(MODELS / case)), {}
    for name in source.tensors:
        plain = name.removeprefix("language_model.").replace("model.language_model.", "model.")
        if plain.startswith(("model.embed_tokens", "model.layers", "model.norm", "model.final_layernorm", "model.per_layer", "lm_head")):
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
) -> Path:
    """Write a golden model as llama.cpp's converter would: in f32, or with matrices quantised to `kind`. `add` adds entries and tensors to
    the file. The file counts `num_ahead` layers that predict further tokens."""
    values, converter = decoder_values(case), CONVERTERS.get(arch, Converter())

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
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)
            writer.add_tensor("rope_factors_short.weight", np.array(scaling.short_factors, np.float32))
            writer.add_tensor("rope_factors_long.weight", np.array(scaling.long_factors, np.float32))
        names = gguf.get_tensor_name_map(ARCHITECTURES[arch], values["num_hidden_layers"])
        # GGUF's tensor names in a model without experts
        dense = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH.LLAMA, values["num_hidden_layers"])
        for name, tensor in converted_tensors(case, converter, stacks_qkv).items():
            own = names.get_name(name, try_suffixes=(".weight", ".bias")) or dense.get_name(name, try_suffixes=(".weight",))
            if (scale := next((scale for part, scale in SCALES.items() if name.endswith(part)), None)) is not None:
                writer.add_tensor(f"blk.{name.split('.')[2]}.{scale}", tensor)
                continue
            assert own is not None, name
            own = own if name.endswith((".weight", ".bias", ".A_log")) else f"{own}.weight"
            if kind is None or tensor.ndim < 2 or tensor.shape[-1] % 32:
                writer.add_tensor(own, tensor)
            else:
                writer.add_tensor(own, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        if arch == "gemma4":  # divisors of the frequencies of layers without a window; pairs with huge divisors do not rotate
            pairs = values["global_head_dim"] // 2
            num_rotated = int(pairs * values["rope_parameters"]["full_attention"]["partial_rotary_factor"])
            writer.add_tensor("rope_freqs.weight", np.repeat(np.array([1, 1e30], np.float32), (num_rotated, pairs - num_rotated)))
        add(writer)

    return write(path, fill, arch)


def converted_tensors(case: str, converter: Converter, stacks_qkv: bool) -> dict[str, np.ndarray]:
    values, tensors = decoder_values(case), decoder_tensors(case)
    for name, tensor in tensors.items():
        if converter.permutes and ("q_proj" in name or "k_proj" in name):
            tensors[name] = interleaved(tensor, values["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] = tensor + np.float32(converter.norm_shift)
    if converter.tiles:
        tensors = {name.replace("dt_bias", "dt_proj.bias"): tensor for name, tensor in with_tiled_heads(tensors, values).items()}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = -np.exp(tensor)
        if "conv1d" in name:
            tensors[name] = tensor.squeeze(1)
    for name in [name for name in tensors if ".experts.gate_proj" in name and converter.joins_experts]:
        both = [tensors.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both, axis=1)
    for name in [name for name in tensors if stacks_qkv and "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return tensors


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
