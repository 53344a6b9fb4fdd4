"""A GGUF file in the terms of the hub: its configuration as a config.json has it, its tensors under the names and in the layout of
a safetensors file. Behind this, the rest of the compiler does not know which of the two a model came from.

What converters did to the tensors is undone: rows of Llama's query and key projections were reordered so that pairs to rotate
are neighbours, and one was added to the norms of Gemma.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import DamagedFile, ModelError, UnknownModel
from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.registry import GGUF_FAMILIES, parse_config
from compiler.frontend.weights import Tensor, TensorInfo

FLOAT32 = np.dtype(np.float32)


COMMON_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
COMMON_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tensors of the configuration: divisors per pair of a head's dimensions. Llama 3 has one list, Phi-3 one per range of contexts.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
MAX_ROPE_FACTOR_BYTES = 1 << 16


class GgufModel:
    """A WeightSource with the configuration that belongs to it."""

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        name = self.file.metadata.get("general.architecture")
        family = GGUF_FAMILIES.get(name) if isinstance(name, str) else None
        if family is None or family.gguf is None:
            raise UnknownModel(f"{self.file.path.name}: general.architecture is {name!r}; known are {', '.join(GGUF_FAMILIES)}")
        self._family, self._gguf = family, family.gguf
        self._metadata = {key.removeprefix(f"{name}."): value for key, value in self.file.metadata.items() if key.startswith(f"{name}.")}
        self._sources = {hub: own for own in self.file.tensors if (hub := self._hub_name(own)) is not None}
        self.config: ModelConfig = parse_config(self._read_config())
        self.tensors: Mapping[str, TensorInfo] = {hub: self._info(own) for hub, own in self._sources.items()}

    def read(self, name: str) -> Tensor:
        own = self._sources[name]
        tensor = self.file.read(own)
        if self._is_reordered(own):
            num_heads = self.config.num_heads if ".attn_q." in own else self.config.num_kv_heads
            return _split_pairs(tensor, num_heads)
        if self._is_shifted_norm(own):
            return tensor.astype(FLOAT32) - np.float32(self._gguf.norm_offset)
        return tensor

    def release(self, name: str) -> None:
        self.file.release(self._sources[name])

    def digest(self) -> str:
        return self.file.digest()

    def _hub_name(self, own: str) -> str | None:
        """None for what the configuration has taken in. An unknown name stays what it is, for the accounting to find."""
        if own in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
            return None
        stem, _, kind = own.rpartition(".")
        if stem in NAMES:
            return f"{NAMES[stem]}.{kind}"
        names = {**COMMON_LAYER_NAMES, **self._gguf.layer_names}
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem, re.ASCII)
        if match is None or match[2] not in names:
            return own
        return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"

    def _is_reordered(self, own: str) -> bool:
        return self._gguf.pairs_interleaved and re.search(r"\.attn_[qk]\.", own) is not None

    def _is_shifted_norm(self, own: str) -> bool:
        return self._gguf.norm_offset != 0 and own.endswith("norm.weight")

    def _info(self, own: str) -> TensorInfo:
        tensor = self.file.tensors[own]
        dtype = tensor.format.dtype or FLOAT32
        return TensorInfo(tensor.shape, FLOAT32 if self._is_shifted_norm(own) else dtype, tensor.num_bytes)

    # --- configuration ---

    def _read_config(self) -> dict[str, Any]:
        metadata, tensors = self._metadata, self.file.tensors
        if metadata.get("expert_count", 0):
            raise ModelError(f"{self.file.path.name} has {metadata['expert_count']} experts; mixtures of experts are not supported")
        fields = {**COMMON_FIELDS, **self._gguf.fields}
        config = {fields[key]: value for key, value in metadata.items() if key in fields}
        if not config.get("sliding_window", 1):
            del config["sliding_window"]  # 0 is written for "none"
        config["model_type"] = self._family.model_types[0]
        if "vocab_size" not in config and (embeddings := tensors.get("token_embd.weight")) is not None and embeddings.shape:
            config["vocab_size"] = embeddings.shape[0]
        config["tie_word_embeddings"] = "output.weight" not in tensors
        self._gguf.complete(config, metadata, tensors)
        if "sliding_window_pattern" not in config and type(period := metadata.get("attention.sliding_window_pattern")) is int:
            config["sliding_window_pattern"] = period
        config["rope_scaling"] = self._rope_scaling()
        return config

    def _rope_scaling(self) -> dict[str, Any] | None:
        if ROPE_FACTORS in self.file.tensors:
            divisors = self._divisors(ROPE_FACTORS)
            return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        if SHORT_FACTORS in self.file.tensors and LONG_FACTORS in self.file.tensors:
            return {
                "rope_type": "longrope",
                "short_factor": self._divisors(SHORT_FACTORS),
                "long_factor": self._divisors(LONG_FACTORS),
                "attention_factor": self._metadata.get("rope.scaling.attn_factor"),
                "original_max_position_embeddings": self._metadata.get("rope.scaling.original_context_length"),
            }
        kind = self._metadata.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._metadata.get("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._metadata.get("rope.scaling.original_context_length")
        return scaling

    def _divisors(self, name: str) -> list[float]:
        if (num_bytes := self.file.tensors[name].num_bytes) > MAX_ROPE_FACTOR_BYTES:
            raise DamagedFile(f"{name} has {num_bytes} bytes; at most {MAX_ROPE_FACTOR_BYTES} are read")
        return [float(divisor) for divisor in np.ravel(self.file.read(name))]


def _split_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows 0 1 2 3 ... of a head are halves a0 b0 a1 b1 ... of its pairs; the hub has all a, then all b."""
    if tensor.shape[0] % (2 * num_heads):
        raise DamagedFile(f"a projection of {tensor.shape[0]} rows cannot be split into {num_heads} heads of pairs")
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
