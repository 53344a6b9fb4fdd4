"""A model of a type that nobody knows may be one of a known family under another name: by its fields, and by its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.accounting import require_weights
from compiler.frontend.config import FAMILIES, ModelConfig, parse_config
from compiler.frontend.decoder import UNUSED as DECODER_UNUSED
from compiler.frontend.decoder import StepBounds, build_step
from compiler.frontend.encoder import UNUSED as ENCODER_UNUSED
from compiler.frontend.encoder import EncodeBounds, build_encode
from compiler.frontend.errors import ConfigError, ModelError, WeightMismatch
from compiler.frontend.fields import Fields, read_json
from compiler.frontend.models.registry import CAUSAL, ENCODERS
from compiler.frontend.weights import WeightSource, open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule

# Fields that say nothing of the wiring.
METADATA = """
_name_or_path architectures attention_dropout auto_map bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
dtype embd_pdrop eos_token_id gradient_checkpointing hidden_act hidden_dropout hidden_dropout_prob id2label attention_probs_dropout_prob
initializer_range label2id model_type pad_token_id pretraining_tp resid_pdrop torch_dtype transformers_version use_cache
"""


def remedy(directory: Path) -> str:
    """What to do about a directory whose model type is not known; empty where no family is like it."""
    values = read_json(directory / "config.json")
    alike = _alike(values)
    try:
        source = open_safetensors(directory)
    except ModelError:
        twins = _nearest(alike)
        return f". Its fields are those of {twins}: if it is wired alike, set model_type to that in config.json" if twins else ""
    twins = _nearest({name: lacking for name, lacking in alike.items() if _takes({**values, "model_type": name}, source)})
    return f". Its fields and its tensors are those of {twins}: set model_type to that in config.json" if twins else ""


def _alike(values: Mapping[str, Any]) -> dict[str, int]:
    """Known families that understand every field, and how many of theirs are not there. An architecture of the same name as a known one's
    says it outright."""
    architectures = values.get("architectures")
    declared = [str(item).lower() for item in architectures] if isinstance(architectures, list) else []
    for name in FAMILIES:
        if f"{name.removesuffix('_text').replace('-', '')}forcausallm" in declared:
            return {name: 0}
    lacking: dict[str, int] = {}
    for name, read in FAMILIES.items():
        fields = Fields(values, "config.json")
        try:
            read(fields)
        except ConfigError:
            continue
        if values.keys() <= fields.asked.union(METADATA.split()):
            lacking[name] = len(fields.asked - values.keys())
    return lacking


def _nearest(lacking: Mapping[str, int]) -> str:
    return " or ".join(repr(name) for name, count in lacking.items() if count == min(lacking.values()))


def _takes(values: Mapping[str, Any], source: WeightSource) -> bool:
    """Whether a model of this configuration needs just these tensors."""
    dtypes = {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}
    try:
        module, unused = _program(parse_config(values), dtypes)
        require_weights(module, source, unused)
    except (ConfigError, WeightMismatch):
        return False
    return True


def _program(config: ModelConfig, dtypes: Mapping[str, DType]) -> tuple[IRModule, tuple[str, ...]]:
    if config.is_causal:
        return build_step(config, CAUSAL[config.family], dtypes, StepBounds(1, 1, 1), DType.F32), DECODER_UNUSED
    return build_encode(config, ENCODERS[config.family], dtypes, EncodeBounds(1, 1)), ENCODER_UNUSED
