"""Golden models as GGUF files, written by the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from compiler.frontend.registry import GGUF_FAMILIES, load_config
from compiler.frontend.weights import open_safetensors

MODELS = Path(__file__).parent / "models"
Fill = Callable[[gguf.GGUFWriter], object]


def write(path: Path, fill: Fill, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """As converters order the rows of Llama's queries and keys: the two halves of a head, turn by turn."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


def convert(case: str, arch: str, path: Path, add: Fill = lambda _: None) -> Path:
    """A golden model as llama.cpp's converter would write it, in f32. `add` writes what else belongs into the file."""
    values = json.loads((MODELS / case / "config.json").read_text())
    source = open_safetensors(MODELS / case)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(values["num_hidden_layers"])
        writer.add_context_length(values["max_position_embeddings"])
        writer.add_embedding_length(values["hidden_size"])
        writer.add_feed_forward_length(values["intermediate_size"])
        writer.add_head_count(values["num_attention_heads"])
        writer.add_head_count_kv(values["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
        writer.add_rope_freq_base(values["rope_theta"])
        if "head_dim" in values:
            writer.add_key_length(values["head_dim"])
        if arch.startswith("gemma") or arch == "phi3":
            writer.add_sliding_window(values["sliding_window"] or 0)
        if arch == "phi3":
            head_dim = values["hidden_size"] // values["num_attention_heads"]
            writer.add_rope_dimension_count(int(values.get("partial_rotary_factor", 1.0) * head_dim))
        if case == "phi3-longrope":
            scaling = load_config(MODELS / case).rope.scaling
            writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)
            writer.add_tensor("rope_factors_short.weight", np.array(scaling.short_factors, np.float32))
            writer.add_tensor("rope_factors_long.weight", np.array(scaling.long_factors, np.float32))
        if arch == "gemma2":
            writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(values["final_logit_softcapping"])
        if arch == "gemma3":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(values["rope_scaling"]["factor"])
            writer.add_sliding_window_pattern(values["sliding_window_pattern"])
        gguf_names = GGUF_FAMILIES[arch].gguf
        assert gguf_names is not None
        names = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH[arch.upper()], values["num_hidden_layers"])
        for name in source.tensors:
            tensor = source.read(name).astype(np.float32)
            if gguf_names.pairs_interleaved and ("q_proj" in name or "k_proj" in name):
                heads = values["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensor = interleaved(tensor, heads)
            if arch.startswith("gemma") and name.endswith("norm.weight"):
                tensor = tensor + 1
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert own is not None, name
            writer.add_tensor(own, tensor)
        add(writer)

    return write(path, fill, arch)
