"""The families: every module of compiler/frontend/families, by the model types it reads. A new file there is a new family."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from compiler.frontend import families
from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import ConfigError, ModelError, UnknownModel
from compiler.frontend.family import DecoderFamily, EncoderFamily, Family
from compiler.frontend.fields import Fields, read_json
from compiler.frontend.metadata import require_read
from compiler.frontend.sentence import load_embedding

_MODULES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
FAMILIES: dict[str, Family] = {name: module.FAMILY for module in _MODULES for name in module.FAMILY.model_types}
GGUF_FAMILIES: dict[str, DecoderFamily] = {
    family.gguf.architecture: family for family in FAMILIES.values() if isinstance(family, DecoderFamily) and family.gguf is not None
}


def decoder_family(model_type: str) -> DecoderFamily:
    family = FAMILIES[model_type]
    assert isinstance(family, DecoderFamily), model_type
    return family


def encoder_family(model_type: str) -> EncoderFamily:
    family = FAMILIES[model_type]
    assert isinstance(family, EncoderFamily), model_type
    return family


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of a model directory."""
    directory = Path(path)
    if not (file := directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; expected a directory as a model hub has it, or a .gguf file")
    config = parse_config(read_json(file))
    return replace(config, embedding=load_embedding(directory, config.embedding.pooling))


def parse_config(values: object) -> ModelConfig:
    """The content of a config.json."""
    fields = Fields(values, "config.json")
    if "quantization_config" in fields:
        method = fields.fields("quantization_config").text("quant_method", "an unnamed method")
        raise ConfigError(f"the weights are quantized already, by {method}; expected a float checkpoint, quantized at load, or GGUF")
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownModel(f"model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    config = family.read(fields)
    require_read(fields, model_type)
    return config
