"""GET /v1/models: what can be asked, under which names."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response

from server.api.answer.respond import json_answer
from server.api.answer.shapes import ModelEntry, ModelList, Restarting
from server.api.context import Context
from server.api.request.prepare import context_of
from server.api.routes import gives, new_router
from server.interfaces import Outage
from server.models.model import Model, ModelState
from server.models.registry import Registry


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")
    registry = context.registry

    @routes.get("/v1/models", responses=gives(ModelList))
    async def list_models() -> Response:
        """The loaded models."""
        ready = [model for model in registry.models() if model.state is ModelState.READY]
        listed: ModelList = {"object": "list", "data": [describe(model, registry) for model in ready]}
        return json_answer(listed)

    @routes.get("/v1/models/{model:path}", responses=gives(ModelEntry))
    async def get_model(model: str) -> Response:
        """One loaded model, by name or alias."""
        found, _ = registry.serve(model)
        return json_answer(describe(found, registry))

    return routes


def describe(model: Model, registry: Registry) -> ModelEntry:
    described: ModelEntry = {
        "id": model.spec.name,
        "object": "model",
        "created": model.created,
        "owned_by": "relaxserve",
        "root": model.spec.name,
        "aliases": registry.aliases_of(model.spec.name),
    }
    if model.loaded is not None:
        ready = model.loaded.ready
        described["max_model_len"] = context_of(model.loaded)
        described["signature"] = ready.signature
        described["generates"] = ready.generates
        if page := registry.publications.address(model.spec.name):
            described["web"] = page
        described["embedding_size"] = ready.embedding_size or None
        described["prompts"] = dict(ready.prompts)
    return described


def progress_of(outage: Outage) -> Restarting:
    now_s = time.monotonic()
    next_try_s = None if outage.next_try_s is None else round(max(0.0, outage.next_try_s - now_s), 2)
    return {"since_s": round(now_s - outage.began_s, 2), "tries": outage.num_tries, "next_try_s": next_try_s}
