"""Give advice for a model of an unknown type, which may be that of a known family under another name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.accounting import require_weights
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import UNUSED as DECODER_UNUSED
from compiler.frontend.decoder import StepBounds, build_step
from compiler.frontend.encoder import UNUSED as ENCODER_UNUSED
from compiler.frontend.encoder import EncodeBounds, build_encode
from compiler.frontend.errors import ModelError
from compiler.frontend.fields import read_json
from compiler.frontend.registry import FAMILIES, parse_config, weights_of
from compiler.frontend.weights import WeightSource, open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule


def remedy(directory: Path) -> str:
    """Return the end of an error's message: the remedy for a directory whose model type is unknown, or "" if there is none. There is a
    remedy only if `architectures` in config.json names a known model type, and the fields and the tensors are those of that type. A known
    name is necessary, since models with equal fields and tensors may compute different things (helium interleaves its rotary pairs, llama
    does not)."""
    values = read_json(directory / "config.json")
    architectures = values.get("architectures")
    declared = {_flat(str(item).lower()) for item in architectures} if isinstance(architectures, list) else set[str]()
    twins = [name for name in FAMILIES if declared & {_flat(name) + suffix for suffix in ("forcausallm", "model", "formaskedlm")}]
    try:
        source = open_safetensors(directory)
    except ModelError:
        return ""
    twins = [name for name in twins if _takes({**values, "model_type": name}, source)]
    return f". Its architecture and its tensors are those of {twins[0]!r}: set model_type to {twins[0]!r} in config.json" if twins else ""


def _flat(model_type: str) -> str:
    """Return the model type in the spelling of architecture names."""
    return model_type.removesuffix("_text").replace("-", "").replace("_", "")


def _takes(values: Mapping[str, Any], source: WeightSource) -> bool:
    """Return whether the configuration is supported, and its model needs exactly the tensors of the source."""
    try:
        config = parse_config(values)
        source = weights_of(config, source)
        dtypes = {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}
        module, unused = _program(config, dtypes)
        require_weights(module, source, unused)
    except ValueError:  # a ModelError, or an element type that no program reads
        return False
    return True


def _program(config: ModelConfig, dtypes: Mapping[str, DType]) -> tuple[IRModule, tuple[str, ...]]:
    if config.is_causal:
        return build_step(config, dtypes, StepBounds(1, 1, 1), DType.F32), DECODER_UNUSED
    return build_encode(config, dtypes, EncodeBounds(1, 1)), ENCODER_UNUSED
