"""The registry of families: it maps each model type to the `FAMILY` that reads it, and finds all modules of compiler/frontend/families
without registration. This module also reads the configuration of a model directory, through the family of its model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from compiler.frontend import families
from compiler.frontend.alignment import read_heads
from compiler.frontend.classes import read_classes
from compiler.frontend.config import DECODERS_ONLY, ModelConfig, require_causal
from compiler.frontend.cutting import has_processor, read_cutting
from compiler.frontend.errors import ConfigError, ModelError, UnknownModel, listed
from compiler.frontend.family import DecoderFamily, EncoderFamily, Family, Gguf
from compiler.frontend.fields import Fields, read_json
from compiler.frontend.joint import joint
from compiler.frontend.layers.audio import WithTables, tables
from compiler.frontend.metadata import require_read
from compiler.frontend.mixture import joint_experts, without
from compiler.frontend.quantized.source import FIELDS as QUANTISATION
from compiler.frontend.reranker import FIELDS as JUDGING
from compiler.frontend.reranker import read_pair_prompt, read_verdict
from compiler.frontend.sentence import load_embedding
from compiler.frontend.towers import require_windows
from compiler.frontend.weights import INDEX_FILE, WHOLE_FILE, Renamed, WeightSource
from runtime.files import is_there

_MODULES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
FAMILIES: dict[str, Family] = {name: module.FAMILY for module in _MODULES for name in module.FAMILY.model_types}
# The families of encoders that read decoders whose attention is not causal, by the model types of these decoders.
BOTH_WAYS = {name: family for family in FAMILIES.values() if isinstance(family, EncoderFamily) for name in family.both_ways}


NO_MODEL = "expected a model directory as downloaded from a hub, or a .gguf file"
ADAPTER = "adapter_config.json"  # the configuration of an adapter, in the format of peft


def _gguf_families() -> dict[str, list[tuple[Gguf, str]]]:
    """Map each `general.architecture` to the `Gguf` and the first model type of each of its families. If families share an architecture,
    those with `Gguf.mark` come first."""
    found: dict[str, list[tuple[Gguf, str]]] = {}
    for family in (module.FAMILY for module in _MODULES):
        if isinstance(family, DecoderFamily) and (gguf := family.gguf) is not None:
            found.setdefault(gguf.architecture, []).append((gguf, family.model_types[0]))
            if (other := gguf.with_experts) is not None:
                found.setdefault(other, []).append((replace(gguf, architecture=other), family.model_types[0]))
    return {name: sorted(sharing, key=lambda pair: pair[0].mark is None) for name, sharing in sorted(found.items())}


GGUF_FAMILIES = _gguf_families()


def gguf_family(metadata: Mapping[str, Any]) -> tuple[Gguf, str] | None:
    """Return the `Gguf` and the model type of the family that reads a file with this metadata, or None if no family does."""
    name = metadata.get("general.architecture")
    for gguf, model_type in GGUF_FAMILIES.get(name, []) if isinstance(name, str) else []:
        value = metadata.get(f"{name}.{gguf.mark}")
        if gguf.mark is None or (isinstance(value, int | float) and value != 0):
            return gguf, model_type
    return None


def decoder_family(model_type: str) -> DecoderFamily:
    """Return the family that reads this model type, which must be that of a decoder."""
    family = FAMILIES[model_type]
    assert isinstance(family, DecoderFamily), model_type
    return family


def encoder_family(model_type: str) -> EncoderFamily:
    """Return the family that reads this model type, which must be that of an encoder."""
    family = FAMILIES[model_type]
    assert isinstance(family, EncoderFamily), model_type
    return family


def weights_of(config: ModelConfig, files: WeightSource) -> WeightSource:
    """Return a source with the tensors that programs of the family read. For decoders, some tensors of the files are renamed, joined or
    left out, and the tables of the spectrogram are added if the model has an encoder of audio."""
    if not config.is_causal:
        return files
    family = decoder_family(config.family)
    unused = (*config.unused, *(f"{part}.*" for part in config.left_out))
    used = without(files, unused) if unused else files
    named = Renamed(used, family.renamed) if family.renamed else used
    joined = joint(joint_experts(named, family.experts), family.joined)
    return joined if config.num_mels is None else WithTables(joined, tables(config.num_mels, config.listening))


def load_config(path: str | Path) -> ModelConfig:
    """Read the configuration of a model directory."""
    return config_of(Path(path), read_config(Path(path)))


def read_config(directory: Path) -> Mapping[str, Any]:
    """Return the fields of a model directory's config.json. Raise ModelError if the directory has no such file, or also has an adapter with
    weights, and ConfigError if the file cannot be read."""
    if not is_there(file := directory / "config.json"):
        raise ModelError(f"{directory} has no config.json; {_what_is_there(directory)}")
    # If peft is installed, transformers applies the adapter. Version 4 applies it to the base model that the adapter names, and does not
    # read the weights in the directory. Later releases of version 5 apply it to the weights in the directory. No file says whether these
    # weights already contain the adapter.
    if is_there(directory / ADAPTER) and any(map(is_there, directory.glob("adapter_model.*"))):
        text = f"{directory} has {ADAPTER} beside its config.json: {_adapter_in(directory)}"
        raise ModelError(f"{text}. If the weights have the adapter already, load a copy of the folder without {ADAPTER}")
    return read_json(file)


def config_of(directory: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a model directory, given the fields of its config.json; other files of the directory complete it. Raise
    ModelError if no family reads the model type, or if one of the files is damaged or states something that is not supported."""
    config = parse_config(values)
    config = replace(config, embedding=load_embedding(directory, config.embedding))
    if (hearing := config.hearing) is not None:
        config = replace(config, hearing=replace(hearing, aligned=read_heads(directory, config.num_layers, config.num_heads)))
    if (vision := config.vision) is not None:
        sees = not vision.is_optional or has_processor(directory)
        config = replace(config, vision=replace(vision, cutting=read_cutting(directory, vision)) if sees else None)
        require_windows(config)
    if not config.is_causal:
        return config
    if (judged := read_verdict(directory, values, config.family, config.vocab_size)) is not None:
        config = replace(config, classes=judged[0], verdict=judged[1])
    if config.classes is None:
        return config
    return replace(config, pair_prompt=read_pair_prompt(directory, config.family, config.classes, config.verdict))


def _what_is_there(directory: Path) -> str:
    """Return what a directory without a config.json contains, and what to do about it."""
    if is_there(directory / ADAPTER):
        return f"it is {_adapter_in(directory)}"
    if (directory / "params.json").is_file():
        return "params.json belongs to a publisher's own format; take the model's files for transformers, which have a config.json"
    models = [entry.name for entry in sorted(directory.iterdir()) if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    return f"name one of the models in it: {listed(models)}" if models else NO_MODEL


def _adapter_in(directory: Path) -> str:
    """Say for which model the adapter in a directory is, and what to do about it."""
    base = Fields(read_json(directory / ADAPTER), ADAPTER).raw("base_model_name_or_path", "another model")
    return (
        f"an adapter (LoRA) for {base!r:.200}, and adapters are not supported. Merge it once with peft and transformers: "
        "AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)"
    )


def parse_config(values: object) -> ModelConfig:
    """Parse the content of a config.json. Raise UnknownModel if no family reads its model type, and ConfigError if a field is missing, is
    not known, or has an unsupported value."""
    fields = Fields(values, "config.json")
    fields.skip(*QUANTISATION)  # `compiler/frontend/quantized` reads these fields
    fields.skip(*JUDGING)  # `read_verdict` reads these fields
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownModel(f"model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    if fields.raw("transformers_weights", WHOLE_FILE) not in (WHOLE_FILE, INDEX_FILE):  # names the file that transformers reads
        raise fields.error("transformers_weights", f"{WHOLE_FILE} or {INDEX_FILE}: no other file is read")
    if not fields.flag("is_causal", True):
        family = BOTH_WAYS.get(model_type, family)
    if isinstance(family, DecoderFamily):
        require_causal(fields)
    config = family.read(fields)
    if config.is_causal:
        config = replace(config, classes=read_classes(fields))
    elif config.activation in DECODERS_ONLY:
        raise ConfigError(f"the activation of {fields.where} is {config.activation}, which no encoder has")
    require_read(fields, model_type)
    return config
