"""The administration under the names of Triton and llama.cpp, for clients that know those.

A model that is named without a source is the folder of that name below the model root.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from server.api.admin.answers import FinishedLoad, LlamaDone, LlamaModel, LlamaModels, TritonModel
from server.api.admin.endpoint import LoadBody, Name, spec_of, waited
from server.api.answer.respond import json_answer
from server.api.context import Context
from server.api.request.fields import Options
from server.api.request.prepare import invalid
from server.api.routes import ADMINISTRATION, gives, new_router, schema_of
from server.models.model import ModelState, Unloaded

TRITON_STATES = {ModelState.LOADING: "LOADING", ModelState.READY: "READY", ModelState.DRAINING: "UNLOADING"}
LLAMA_STATES = {ModelState.LOADING: "loading", ModelState.READY: "loaded", ModelState.DRAINING: "unloaded"}

DONE: LlamaDone = {"success": True}


class TritonBody(Options):
    source: Annotated[str, Field(max_length=1024)] | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class LlamaBody(Options):
    model: Name


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION)
    registry, settings = context.registry, context.settings

    async def load(name: str, source: str | None = None) -> FinishedLoad:
        operation = await registry.load(spec_of(LoadBody(name=name, source=source or name), settings))
        return await waited(operation, registry)

    @routes.post("/v1/models/{model:path}/load", responses=gives(FinishedLoad))
    @routes.post("/v2/repository/models/{model:path}/load", include_in_schema=False)
    async def triton_load(model: Name, body: TritonBody | None = None) -> Response:
        """Load a model and wait for it, as Triton's front end does."""
        for parameter in (body.parameters if body else None) or {}:
            raise invalid(f"parameters.{parameter}", f"parameters has {parameter!r:.40}; none is understood, use /admin/models")
        return json_answer(await load(model, body.source if body else None))

    @routes.post("/v1/models/{model:path}/unload", responses=gives(Unloaded))
    @routes.post("/v2/repository/models/{model:path}/unload", include_in_schema=False)
    async def triton_unload(model: str, body: TritonBody | None = None) -> Response:
        """Unload a model, as Triton's front end does."""
        for parameter in (body.parameters if body else None) or {}:
            if parameter != "unload_dependents":  # no model has any
                raise invalid(f"parameters.{parameter}", f"parameters has {parameter!r:.40}; expected unload_dependents")
        return json_answer(await registry.unload(model, drain_s=settings.drain_s))

    @routes.post("/v2/repository/index", responses=gives({"type": "array", "items": schema_of(TritonModel)}))
    async def triton_index() -> Response:
        """Every model with its state, as Triton lists them."""
        listed: list[TritonModel] = [
            {"name": model.spec.name, "version": "1", "state": TRITON_STATES[model.state], "reason": ""} for model in registry.models()
        ]
        return json_answer(listed)

    @routes.post("/models/load", responses=gives(LlamaDone))
    async def llama_load(body: LlamaBody) -> Response:
        """Begin to load a model, as llama.cpp's router does."""
        await registry.load(spec_of(LoadBody(name=body.model, source=body.model), settings))
        return json_answer(DONE)

    @routes.post("/models/unload", responses=gives(LlamaDone))
    async def llama_unload(body: LlamaBody) -> Response:
        """Unload a model, as llama.cpp's router does."""
        await registry.unload(body.model, drain_s=settings.drain_s)
        return json_answer(DONE)

    @routes.get("/models", responses=gives(LlamaModels))
    async def llama_models() -> Response:
        """Every model with its state, as llama.cpp lists them."""
        data: list[LlamaModel] = [
            {"id": model.spec.name, "object": "model", "status": {"value": LLAMA_STATES[model.state]}} for model in registry.models()
        ]
        listed: LlamaModels = {"object": "list", "data": data}
        return json_answer(listed)

    return routes
