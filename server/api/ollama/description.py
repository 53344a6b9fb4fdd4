"""Describe models in Ollama's shape, for /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from server.api.request.prepare import context_of
from server.models.model import Loaded, Model

NEVER = "9999-12-31T23:59:59Z"  # models stay loaded until they are unloaded
PARAMETERS = {  # this server's name of a parameter -> Ollama's name
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_tokens": "num_predict",
}


class OllamaDetails(TypedDict):
    """The format and the size of a model's files."""

    parent_model: str
    format: str
    family: str
    families: Sequence[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(TypedDict):
    models: Sequence[OllamaModel]


class OllamaRunning(OllamaModel):
    """A model in memory."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(TypedDict):
    models: Sequence[OllamaRunning]


class _System(TypedDict):
    """The field that only a model with a default system message has."""

    system: NotRequired[str]


class OllamaShown(_System):
    """A model and its capabilities."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Mapping[str, Any]
    capabilities: Sequence[str]
    modified_at: str


def described(name: str, model: Model, loaded: Loaded) -> OllamaModel:
    """Describe a model's files under a name that the caller may use. `digest` identifies the name and the compiled model."""
    return {
        "name": name,
        "model": name,
        "modified_at": model.created_at,
        "size": loaded.ready.facts.file_bytes,
        "digest": hashlib.sha256(f"{name} {loaded.ready.signature}".encode()).hexdigest(),
        "details": _details(loaded),
    }


def running(name: str, model: Model, loaded: Loaded) -> OllamaRunning:
    """Describe a model in memory. `size` is the memory that the model held when it was measured last, or on a GPU the planned memory, which
    is allocated at load."""
    on_gpu = model.total_bytes if loaded.ready.card is not None else 0
    return {
        **described(name, model, loaded),
        "size": on_gpu or model.memory["resident_bytes"],
        "expires_at": NEVER,
        "size_vram": on_gpu,
        "context_length": context_of(loaded),
    }


def shown(name: str, model: Model, loaded: Loaded) -> OllamaShown:
    """Describe a model and its capabilities, under a name that the caller may use."""
    facts, family = loaded.ready.facts, loaded.ready.facts.family or "relaxserve"
    template = loaded.tokenizer.chat_template
    system: _System = {} if loaded.defaults.system is None else {"system": loaded.defaults.system}
    parameters = list(_parameters(loaded))
    return {
        "modelfile": "".join(f"{line}\n" for line in _modelfile(name, loaded, parameters)),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),  # in columns, as Ollama writes them
        "template": "" if template is None else template.source,
        **system,
        "details": _details(loaded),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": context_of(loaded),
            f"{family}.embedding_length": loaded.ready.embedding_size,
        },
        "capabilities": capabilities(loaded),
        "modified_at": model.created_at,
    }


def capabilities(loaded: Loaded) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    known = {
        "completion": loaded.ready.generates,
        "tools": loaded.chats and loaded.dialect.reads_tools,
        "thinking": loaded.chats and loaded.dialect.thinks,
        "vision": loaded.chats and loaded.sight is not None,
        "insert": loaded.ready.generates and loaded.dialect.infill is not None,
        "embedding": bool(loaded.ready.embedding_size),
    }
    return [name for name, has in known.items() if has]


def _details(loaded: Loaded) -> OllamaDetails:
    """Describe the files of a model."""
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


def _parameters(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield each parameter under Ollama's name, with its value for requests that do not set it: the model's default, or else the value that
    the model's files recommend. Leave out parameters that have neither. At the end, yield a `stop` for each default stop string."""
    own, recommended = loaded.defaults.given, loaded.tokenizer.generation_defaults
    for ours, theirs in PARAMETERS.items():
        value = own.get(ours, getattr(recommended, ours, None))
        if value is not None:
            yield theirs, f"{value:g}"
    for text in loaded.defaults.stop or ():
        yield "stop", json.dumps(text, ensure_ascii=False)


def _modelfile(name: str, loaded: Loaded, parameters: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a Modelfile that would give a model the defaults of this one. If this model has no defaults of its own, leave out
    the parameters."""
    yield f"FROM {name}"
    if loaded.defaults.system is not None:
        yield f'SYSTEM """{loaded.defaults.system}"""'
    if loaded.defaults.given:
        yield from (f"PARAMETER {name} {value}" for name, value in parameters)
