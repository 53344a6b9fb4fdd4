"""Convert the metadata of a GGUF file to the fields of a config.json.

Converters omit facts that all models of an architecture share; the family's module adds these facts. Other facts that converters omit
cannot be restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.frontend.errors import DamagedFile, ModelError
from compiler.frontend.family import Gguf
from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.sentence import EmbeddingConfig, Pooling

FIELDS = {
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
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
YARN_FIELDS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
# Tensors that belong to the configuration: divisors of the frequency of each rotated pair.
# Llama 3 has one list; Phi-3 has one list for short contexts and one for long contexts.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
POOLINGS = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}  # number of `pooling_type` -> pooling; 0: the file states no pooling
RERANKER = 4  # the `pooling_type` of a reranker
MOST_LAYERS = 10_000
MOST_AHEAD = 100  # maximum number of layers of multi-token prediction
MAX_ROPE_FACTOR_BYTES = 1 << 16
STACKED = {"attn_q": "attn_qkv"}  # name of a projection -> name of the stacked projection in which some files store it


def read_config(file: GgufFile, gguf: Gguf, model_type: str) -> dict[str, Any]:
    """Return the file's metadata, and the facts that the names of its tensors show, as the fields of a config.json with this model type.
    Values keep the types that they have in the file; `Fields` checks them. Raise DamagedFile for numbers of layers out of range and for
    damaged divisors, and ModelError for a scaling of RoPE that is not supported."""
    prefix = f"{gguf.architecture}."
    metadata = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = {**FIELDS, **gguf.fields}
    config: dict[str, Any] = {fields[key]: value for key, value in metadata.items() if key in fields}
    config["model_type"] = model_type
    if not metadata.get("attention.causal", True):
        config["is_causal"] = False
    if type(config.get("num_hidden_layers")) is int:
        if config["num_hidden_layers"] > MOST_LAYERS:  # `gguf.complete` may loop over the layers
            raise DamagedFile(f"block_count is {config['num_hidden_layers']}, expected at most {MOST_LAYERS}")
        config["num_hidden_layers"] -= num_ahead(metadata)
    if "vocab_size" not in config and (embeddings := file.tensors.get("token_embd.weight")) is not None and embeddings.shape:
        config["vocab_size"] = embeddings.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["rope_scaling"] = _rope_scaling(file, metadata)
    for flag, projection in gguf.biases.items():
        config[flag] = any(f"blk.0.{name}.bias" in file.tensors for name in (projection, STACKED.get(projection)))
    if gguf.query_norm is not None:
        config[gguf.query_norm] = "blk.0.attn_q_norm.weight" in file.tensors
    _complete_heads(config, metadata)
    _complete_windows(config, metadata)
    gguf.complete(config, metadata, file.tensors)
    return config


def read_embedding(file: GgufFile, gguf: Gguf) -> EmbeddingConfig | None:
    """Return how a model that was trained for embeddings pools, or None if the file states no pooling. Raise ModelError for a reranker and
    for unknown values."""
    name = f"{gguf.architecture}.pooling_type"
    match file.metadata.get(name, 0):
        case 0:
            return None
        case int(number) if number in POOLINGS:
            return EmbeddingConfig(POOLINGS[number], True, is_stated=True)
        case int(number) if number == RERANKER:
            raise ModelError(f"{file.path.name}: {name} is {number}, a reranker; load the folder with config.json and safetensors files")
        case other:
            raise ModelError(f"{file.path.name}: {name} is {other!r}, expected 0 to {RERANKER}")


def num_ahead(metadata: Mapping[str, Any], prefix: str = "") -> int:
    """Return the number of layers of multi-token prediction, which follow the layers of the decoder. `prefix` begins the key in the
    metadata. Raise DamagedFile if the value is no integer from 0 to MOST_AHEAD."""
    count = metadata.get(f"{prefix}nextn_predict_layers", 0)
    if type(count) is not int or not 0 <= count <= MOST_AHEAD:
        raise DamagedFile(f"nextn_predict_layers is {count!r}, expected an integer from 0 to {MOST_AHEAD}")
    return count


def _complete_heads(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Set the size of a head if the file does not state it, and the fraction of a head that rotates."""
    hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if "head_dim" not in config and type(hidden_size) is int and type(num_heads) is int and num_heads > 0:
        config["head_dim"] = hidden_size // num_heads
    head_dim = config.get("head_dim")
    rotated = metadata.get("rope.dimension_count", head_dim)
    if type(rotated) is int and type(head_dim) is int and head_dim > 0:
        # config.json states a fraction; readers multiply it by head_dim and round down, so 0.5 is added
        config["partial_rotary_factor"] = (rotated + 0.5) / head_dim


def _complete_windows(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Set which layers have a window. If `attention.sliding_window_pattern` is a number n, all layers except every n-th have a window: the
    family reads n. If this entry is an array of flags, the layers whose flag is true have a window. A window of 0 tokens stands for no
    window."""
    if not config.get("sliding_window", 1):
        config["sliding_window"] = None  # 0 stands for no window
    pattern = metadata.get("attention.sliding_window_pattern")
    if type(pattern) is int:
        config["sliding_window_pattern"] = pattern
    elif isinstance(pattern, np.ndarray) and config.get("sliding_window") is not None:
        config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _rope_scaling(file: GgufFile, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the field `rope_scaling`, or None if the rope is not scaled. Divisors of the frequencies become a scaling of type longrope,
    even for Llama 3. Raise ModelError for a mix of scalings that is not supported."""
    if ROPE_FACTORS in file.tensors:
        divisors = _divisors(file, ROPE_FACTORS)
        return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    if SHORT_FACTORS in file.tensors and LONG_FACTORS in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": _divisors(file, SHORT_FACTORS),
            "long_factor": _divisors(file, LONG_FACTORS),
            "attention_factor": metadata.get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length"),
        }
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))  # the second key is that of older files
    kind = metadata.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    if (mix := metadata.get("rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
        raise ModelError(
            f"{file.path.name}: rope.scaling.yarn_ext_factor is {mix!r}, expected 1: other mixes of scalings are not supported"
        )
    scaling = {field: metadata[key] for key, field in YARN_FIELDS.items() if key in metadata}
    if isinstance(factor := scaling.get("attention_factor"), float) and factor < 1:
        # yarn_attn_factor states either `attention_factor`, which is at least 1, or `attn_factor`, which multiplies the usual factor.
        scaling["attn_factor"] = scaling.pop("attention_factor")
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = 1.0  # converters omit the field; it is 1 in Mistral's models, and DeepSeek's families restore their own value
    return {"rope_type": kind, **scaling}


def _divisors(file: GgufFile, name: str) -> list[float]:
    if (num_bytes := file.tensors[name].num_bytes) > MAX_ROPE_FACTOR_BYTES:
        raise DamagedFile(f"{name} has {num_bytes} bytes; at most {MAX_ROPE_FACTOR_BYTES} are read")
    return [float(divisor) for divisor in np.ravel(file.read(name))]
