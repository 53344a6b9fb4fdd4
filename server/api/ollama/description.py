"""Descriptions of models in Ollama's shape: the answers of /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from server.api.request.prepare import context_of
from server.interfaces import GenerationDefaults
from server.models.model import Loaded, Model

NEVER = "9999-12-31T23:59:59Z"  # models stay loaded until they are unloaded
PARAMETERS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: Sequence[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(TypedDict):
    models: Sequence[OllamaModel]


class OllamaRunning(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(TypedDict):
    models: Sequence[OllamaRunning]


class OllamaShown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Mapping[str, Any]
    capabilities: Sequence[str]
    modified_at: str


def described(model: Model, loaded: Loaded) -> OllamaModel:
    """Describe a model's files."""
    return {
        "name": model.spec.name,
        "model": model.spec.name,
        "modified_at": model.created_at,
        "size": loaded.ready.facts.file_bytes,
        "digest": hashlib.sha256(f"{model.spec.name} {loaded.ready.signature}".encode()).hexdigest(),
        "details": _details(loaded),
    }


def running(model: Model, loaded: Loaded) -> OllamaRunning:
    """Describe a model in memory. `size` is the memory that it holds now; on a GPU, where memory is allocated at once, the planned one."""
    on_gpu = model.total_bytes if loaded.ready.card is not None else 0
    return {
        **described(model, loaded),
        "size": on_gpu or model.memory["resident_bytes"],
        "expires_at": NEVER,
        "size_vram": on_gpu,
        "context_length": context_of(loaded),
    }


def shown(model: Model, loaded: Loaded) -> OllamaShown:
    facts, family = loaded.ready.facts, loaded.ready.facts.family or "relaxserve"
    template = loaded.tokenizer.chat_template
    return {
        "modelfile": f"FROM {model.spec.name}\n",
        "parameters": _parameters(loaded.tokenizer.generation_defaults),
        "template": "" if template is None else template.source,
        "details": _details(loaded),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.spec.name,
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": context_of(loaded),
            f"{family}.embedding_length": loaded.ready.embedding_size,
        },
        "capabilities": capabilities(loaded),
        "modified_at": model.created_at,
    }


def capabilities(loaded: Loaded) -> list[str]:
    known = {
        "completion": loaded.ready.generates,
        "tools": loaded.chats and loaded.dialect.reads_tools,
        "thinking": loaded.chats and loaded.dialect.thinks,
        "insert": loaded.ready.generates and loaded.dialect.infill is not None,
        "embedding": bool(loaded.ready.embedding_size),
    }
    return [name for name, has in known.items() if has]


def _details(loaded: Loaded) -> OllamaDetails:
    facts = loaded.ready.facts
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _size(facts.num_parameters),
        "quantization_level": facts.weight_type,
    }


def _size(count: int) -> str:
    """Format a number of parameters as Ollama does: 134.52M, 1.5B."""
    for unit, size, digits in (("B", 1e9, 1), ("M", 1e6, 2), ("K", 1e3, 2)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{unit}"
    return str(count)


def _parameters(defaults: GenerationDefaults) -> str:
    """Return the recommended sampling parameters, one on each line, in columns as Ollama writes them."""
    values = {theirs: getattr(defaults, ours) for ours, theirs in PARAMETERS.items()}
    return "\n".join(f"{name:<30} {value:g}" for name, value in values.items() if value is not None)
