"""GET /v1/models: list and describe the loaded models."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.respond import json_answer
from server.api.answer.shapes import ModelEntry, ModelList, Quality, RequestDefaults, Restarting
from server.api.context import Context
from server.api.request.prepare import context_of
from server.api.routes import gives, new_router
from server.interfaces import Outage
from server.models.model import Loaded, Model, ModelState
from server.models.registry import Registry
from server.models.visible import VisibleModels


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")

    @routes.get("/v1/models", responses=gives(ModelList))
    async def list_models(request: Request) -> Response:
        """List the loaded models that the caller may use."""
        seen = context.models_for(request)
        ready = [model for model in seen.models() if model.state is ModelState.READY]
        entries = [entry for model in ready for entry in _entries(model, seen)]
        first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
        listed: ModelList = {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": False}
        return json_answer(listed)

    @routes.get("/v1/models/{model:path}", responses=gives(ModelEntry))
    async def get_model(request: Request, model: str) -> Response:
        """Describe one loaded model, by name or alias."""
        seen = context.models_for(request)
        found, loaded = seen.serve(model)
        return json_answer(_described(found, seen) if loaded is found.loaded else _variant(model, found, loaded, seen))

    return routes


def _entries(model: Model, seen: VisibleModels) -> list[ModelEntry]:
    """Return the entry of a model, and an entry for each of its aliases that has its own defaults. Leave out the entry of the model if the
    caller may use only such aliases."""
    variants = {} if model.loaded is None else model.loaded.variants
    names = seen.names_of(model)
    plain = [_described(model, seen)] if any(name not in variants for name in names) else []
    return [*plain, *(_variant(name, model, variants[name], seen) for name in names if name in variants)]


def _described(model: Model, seen: VisibleModels) -> ModelEntry:
    """Describe a model by the names that the caller may use. At least one of these names has no defaults of its own. If the caller may not
    use the model's own name, an alias without defaults of its own takes the place of this name."""
    entry = describe(model, seen.registry)
    variants = {} if model.loaded is None else model.loaded.variants
    name, *aliases = [name for name in seen.names_of(model) if name not in variants]
    if name == model.spec.name:
        return {**entry, "aliases": [*aliases, *(name for name in seen.names_of(model) if name in variants)]}
    entry.pop("web", None)  # the path contains the model's own name, which the caller may not use
    return {**entry, "id": name, "display_name": name, "root": name, "aliases": aliases}


def _variant(name: str, model: Model, loaded: Loaded, seen: VisibleModels) -> ModelEntry:
    """Describe an alias that has its own defaults."""
    root = model.spec.name if seen.limits.allow(model.spec.name) else name
    entry: ModelEntry = {**describe(model, seen.registry), "id": name, "display_name": name, "root": root, "aliases": ()}
    entry.pop("web", None)
    return {**entry, **_of_requests(loaded)}


def describe(model: Model, registry: Registry) -> ModelEntry:
    """Describe a model by its own name and all its aliases."""
    described: ModelEntry = {
        "id": model.spec.name,
        "object": "model",
        "type": "model",
        "created": model.created,
        "created_at": model.created_at,
        "display_name": model.spec.name,
        "lifecycle": "active",
        "owned_by": "relaxserve",
        "root": model.spec.name,
        "aliases": registry.aliases_of(model.spec.name),
    }
    if model.loaded is not None:
        ready = model.loaded.ready
        described["max_model_len"] = described["max_input_tokens"] = context_of(model.loaded)
        described["signature"] = ready.signature
        described["generates"] = ready.generates
        if page := registry.publications.address(model.spec.name):
            described["web"] = page
        described["embedding_size"] = ready.embedding_size or None
        if ready.embedding_note:
            described["embedding_note"] = ready.embedding_note
        described["scoring"] = ready.scoring
        described["prompts"] = dict(ready.prompts)
        if (label := ready.label) is not None:
            described["quality"] = Quality(**msgspec.structs.asdict(label))
    return described if model.loaded is None else {**described, **_of_requests(model.loaded)}


def _of_requests(loaded: Loaded) -> RequestDefaults:
    """Describe which inputs the model reads, and the values of fields that a request leaves out."""
    found: RequestDefaults = {"chats": loaded.chats, "sees": loaded.chats and loaded.sight is not None}
    if loaded.chats and loaded.ears is not None:
        found["listens"] = True
    if loaded.speech is not None:
        found["hears"] = True
    if loaded.ready.generates:
        found["sampling"] = loaded.sampling
    others = loaded.defaults.given.keys() - loaded.defaults.sampling.keys() - {"template"}
    if others:
        found["defaults"] = {name: value for name, value in loaded.defaults.given.items() if name in others}
    return found


def progress_of(outage: Outage) -> Restarting:
    """Describe the restart of a worker: the seconds since the outage began, and the seconds until the next try, which are None before the
    first try and while a try is running."""
    now_s = time.monotonic()
    next_try_s = None if outage.next_try_s is None else round(max(0.0, outage.next_try_s - now_s), 2)
    return {"since_s": round(now_s - outage.began_s, 2), "tries": outage.num_tries, "next_try_s": next_try_s}
