"""Administration endpoints under the paths of Triton and llama.cpp, for clients written for those servers.

If a load request has no source, its name is that of a model of this server, or else also the source: a path below the model root, or a
model to download.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from server.api.admin.answers import LlamaDone, LlamaModel, LlamaModels, LlamaStatus, TritonModel, TritonUnloaded
from server.api.admin.endpoint import LoadBody, Name, spec_of, waited
from server.api.answer.respond import json_answer
from server.api.answer.shapes import ModelEntry
from server.api.context import Context
from server.api.openai.models import describe
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.request.prepare import invalid
from server.api.routes import ADMINISTRATION, gives, new_router, schema_of
from server.errors import MODEL_BUSY, ApiError
from server.models.model import Model, ModelState
from server.models.operations import Operation
from server.models.sleep import wake_up
from server.models.sources import offered

TRITON_STATES = {ModelState.LOADING: "LOADING", ModelState.READY: "READY", ModelState.DRAINING: "UNLOADING"}
LLAMA_STATES = {ModelState.LOADING: "loading", ModelState.READY: "loaded", ModelState.DRAINING: "unloaded"}

DONE: LlamaDone = {"success": True}


class TritonBody(Options):
    """The body of Triton's load and unload. `source`, which Triton does not have, says where the model is."""

    source: Annotated[str, Field(max_length=1024)] | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class TritonIndexBody(Options):
    """The body of Triton's list of models."""

    ready: bool | None = None


class LlamaBody(Options):
    """The body of llama.cpp's load and unload."""

    model: Name


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION)
    registry, settings = context.registry, context.settings

    def ignored(body: Options | None) -> dict[str, str]:
        """Return the header that names the unknown fields of a body. Raise ApiError as `check_unknown` does."""
        return {} if body is None else ignored_header(check_unknown(body, strict=settings.strict))

    async def load(name: str, body: TritonBody | None) -> Model:
        """Load a model, and return it once it is ready. Raise ApiError if the body has parameters, or if the load fails."""
        for parameter in (body.parameters if body else None) or {}:
            raise invalid(f"parameters.{parameter}", f"parameters has {parameter!r:.40}, which is not supported here; use /admin/models")
        await waited(await begun(name, body.source if body else None), registry)
        return registry.find(name)

    async def begun(name: str, source: str | None) -> Operation:
        """Begin to load a model, or wake it if it sleeps, and return the operation of its load. For a model that the server has, `name` is
        enough, even if `name` is not the model's source. Raise ApiError if no model has this name or source, or if the model does not wake
        up or is being unloaded."""
        model = next((one for one in registry.models() if one.spec.name == name), None)
        if model is not None and model.is_sleeping and not source:
            await wake_up(model)
            return model.operation
        try:
            spec = spec_of(LoadBody(name=name, source=source or name), registry)
        except ApiError:
            if model is None or source:
                raise
            if model.state is ModelState.DRAINING:
                raise ApiError(MODEL_BUSY, f"model {name!r} is being unloaded; wait until it is gone", param="name") from None
            return model.operation
        operation = await registry.load(spec)
        if model is not None and model.is_sleeping and operation is model.operation:
            await wake_up(model)
        return operation

    async def unload(name: str, body: TritonBody | None) -> None:
        """Unload a model, and return once it is unloaded. Raise ApiError if the body has a parameter other than `unload_dependents`, or if
        the registry refuses to unload the model."""
        for parameter in (body.parameters if body else None) or {}:
            if parameter != "unload_dependents":  # accepted without effect: no model has dependents
                raise invalid(f"parameters.{parameter}", f"parameters has {parameter!r:.40}; expected unload_dependents")
        await registry.unload(name, drain_s=settings.drain_s)

    @routes.post("/v1/models/{model:path}/load", responses=gives(ModelEntry))
    async def triton_load(model: Name, body: TritonBody | None = None) -> Response:
        """Load a model and answer when it is ready, as Triton's OpenAI front end does."""
        headers = ignored(body)
        return json_answer(describe(await load(model, body), registry), headers=headers)

    @routes.post("/v1/models/{model:path}/unload", responses=gives(TritonUnloaded))
    async def triton_unload(model: str, body: TritonBody | None = None) -> Response:
        """Unload a model, as Triton's OpenAI front end does."""
        headers = ignored(body)
        await unload(model, body)
        unloaded: TritonUnloaded = {"status": "success", "model": model}
        return json_answer(unloaded, headers=headers)

    @routes.post("/v2/repository/models/{model:path}/load", response_class=Response, include_in_schema=False)
    async def repository_load(model: Name, body: TritonBody | None = None) -> Response:
        """Load a model, through Triton's repository API, and answer when it is ready. The answer has no body."""
        headers = ignored(body)
        await load(model, body)
        return Response(headers=headers)

    @routes.post("/v2/repository/models/{model:path}/unload", response_class=Response, include_in_schema=False)
    async def repository_unload(model: str, body: TritonBody | None = None) -> Response:
        """Unload a model, through Triton's repository API. The answer has no body."""
        headers = ignored(body)
        await unload(model, body)
        return Response(headers=headers)

    @routes.post("/v2/repository/index", responses=gives({"type": "array", "items": schema_of(TritonModel)}))
    async def triton_index(body: TritonIndexBody | None = None) -> Response:
        """List every model with its state, including failed loads and models that may be loaded. With `ready`, list only models that are
        ready."""
        headers = ignored(body)
        known = [(model.spec.name, TRITON_STATES[model.state], "") for model in registry.models()]
        known += [(operation.model, "UNAVAILABLE", operation.error.message) for operation in registry.failed() if operation.error]
        known += [(name, "UNAVAILABLE", "unloaded") for name in await idle({name for name, _, _ in known})]
        only_ready = body is not None and body.ready is True
        listed: list[TritonModel] = [
            {"name": name, "version": "1", "state": state, "reason": reason}
            for name, state, reason in known
            if state == "READY" or not only_ready
        ]
        return json_answer(listed, headers=headers)

    @routes.post("/models/load", responses=gives(LlamaDone))
    async def llama_load(body: LlamaBody) -> Response:
        """Begin to load a model, as llama.cpp's router does. A sleeping model is awake before the answer is sent."""
        headers = ignored(body)
        await begun(body.model, None)
        return json_answer(DONE, headers=headers)

    @routes.post("/models/unload", responses=gives(LlamaDone))
    async def llama_unload(body: LlamaBody) -> Response:
        """Unload a model, as llama.cpp's router does."""
        headers = ignored(body)
        await registry.unload(body.model, drain_s=settings.drain_s)
        return json_answer(DONE, headers=headers)

    @routes.get("/models", responses=gives(LlamaModels))
    async def llama_models() -> Response:
        """List every model with its state, including failed loads and models that may be loaded, as llama.cpp does."""
        states: dict[str, LlamaStatus] = {model.spec.name: {"value": _llama_state(model)} for model in registry.models()}
        states |= {operation.model: {"value": "unloaded", "failed": True, "exit_code": 1} for operation in registry.failed()}
        states |= {name: {"value": "unloaded"} for name in await idle(states.keys())}
        data: list[LlamaModel] = [{"id": name, "object": "model", "status": status} for name, status in states.items()]
        listed: LlamaModels = {"object": "list", "data": data}
        return json_answer(listed)

    async def idle(known: Collection[str]) -> list[str]:
        """Return the names of the models below the model root that may be loaded, without those that are loaded already, and without
        those in `known`, which the caller lists itself."""
        offers = await asyncio.to_thread(offered, settings)
        used = {model.spec.source for model in registry.models()}
        return [offer.source for offer in offers if offer.source not in known and offer.path not in used]

    return routes


def _llama_state(model: Model) -> str:
    """Return the state of a model as llama.cpp names it."""
    return "sleeping" if model.is_sleeping else LLAMA_STATES[model.state]
