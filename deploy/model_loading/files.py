"""Open the files of a model, which may be a folder in the hub's layout or a GGUF file. Each file is opened once; all later steps of a load
use the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import ModelError, UnknownModel
from compiler.frontend.fields import read_json
from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import HeldWeights, forms_of
from compiler.frontend.quantized.source import QuantizedWeights, methods_beside
from compiler.frontend.registry import load_config, weights_of
from compiler.frontend.unknown import remedy
from compiler.frontend.weights import BesideFolders, WeightSource, open_safetensors
from compiler.ir.dtypes import DType
from server.interfaces import LoadError
from server.messages import ErrorCode


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    config: ModelConfig
    weights: WeightSource
    is_embedder: bool  # whether the model was trained for embeddings, even if it could generate text
    architectures: tuple[str, ...] = ()  # class names from config.json
    gguf: GgufFile | None = None  # the file, if the model is a GGUF file
    held: WeightSource | None = None  # returns the integers of a quantised checkpoint; None if the checkpoint is not quantised

    def source(self, format: WeightFormat) -> WeightSource:
        """Return the source of weights for a program with this format: it returns the checkpoint's integers if the format keeps them,
        otherwise the decoded values."""
        return self.held if self.held is not None and format.as_stored else self.weights


def dtypes_of(source: WeightSource) -> dict[str, DType]:
    return {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}


def open_files(path: Path) -> ModelFiles:
    """Read the configuration and the headers of the weights, but no weights."""
    try:
        if path.is_file():
            model = GgufModel(path)
            held = HeldWeights(model) if model.forms else None
            return ModelFiles(path, model.config, model, model.config.embedding.is_stated, gguf=model.file, held=held)
        config = _config_of(path)
        is_embedder = not config.is_causal or config.classes is not None or (path / "modules.json").is_file()
        weights, held = open_weights(path, config), open_weights(path, config, held=True)
        is_held = bool(forms_of(held.tensors))
        return ModelFiles(path, config, weights, is_embedder, _architectures_of(path), held=held if is_held else None)
    except ModelError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error


def open_weights(folder: Path, config: ModelConfig, *, held: bool = False) -> WeightSource:
    """Open the tensors of a folder under the names that the family's programs use, including the projections that follow the pooling. With
    `held`, read a quantised checkpoint as integers."""
    weights = weights_of(config, _tensors_of(folder, held=held))
    parts = {dense.folder: open_safetensors(folder / dense.folder) for dense in config.embedding.dense}
    return BesideFolders(weights, parts) if parts else weights


def _tensors_of(folder: Path, *, held: bool) -> WeightSource:
    methods = methods_beside(folder)
    if not methods:
        return open_safetensors(folder)
    quantized = QuantizedWeights(open_safetensors(folder), methods)
    return HeldWeights(quantized) if held else quantized


def _architectures_of(folder: Path) -> tuple[str, ...]:
    named = read_json(folder / "config.json").get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def _config_of(folder: Path) -> ModelConfig:
    try:
        return load_config(folder)
    except UnknownModel as error:
        raise UnknownModel(f"{error}{remedy(folder)}") from None
