"""Endpoints for operators: health checks, the number of requests, the version, and the metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from server.api.answer.shapes import Liveness, Load, Readiness, Version
from server.api.context import Context, caller
from server.api.openai.models import progress_of
from server.api.routes import gives, new_router
from server.errors import KEY_RESTRICTED, ApiError
from server.http.auth import Access
from server.models.model import ModelState

READINESS = {**gives(Readiness), **gives(Readiness, status=503)}


def router(context: Context) -> APIRouter:
    routes = new_router("Operation")
    registry = context.registry

    @routes.head("/health/live", include_in_schema=False)  # some load balancers send HEAD
    @routes.get("/health/live", responses=gives(Liveness))
    @routes.get("/v2/health/live", include_in_schema=False)
    async def live() -> JSONResponse:
        """Answer 200 as long as the server process can answer."""
        alive: Liveness = {"status": "ok"}
        return JSONResponse(alive)

    @routes.head("/health", include_in_schema=False)
    @routes.head("/health/ready", include_in_schema=False)
    @routes.get("/health", responses=READINESS)
    @routes.get("/health/ready", responses=READINESS)
    @routes.get("/v1/health", include_in_schema=False)
    @routes.get("/v2/health/ready", include_in_schema=False)
    async def ready(request: Request) -> JSONResponse:
        """Answer 200 if the server is ready for requests. Answer 503 while the models load with which the server was started, while the
        server is about to stop, and if none of its models works. A server without models is ready unless a load at its start has failed or
        was cancelled. If some keys may not use all models, no model is named, since this endpoint needs no key."""
        named = [model for model in registry.models() if caller(request).limits.allow(model.spec.name)]
        models = {model.spec.name: model.condition for model in named}
        status = "ok" if registry.ready else "shutting down" if registry.leaving or registry.closing else "unavailable"
        readiness: Readiness = {"status": status, "models": models}
        if restarting := {model.spec.name: progress_of(model.outage) for model in named if model.outage is not None}:
            readiness["restarting"] = restarting  # the cause of the restart is left out: it may name files, and this endpoint needs no key
        if not registry.ready:
            is_loading = any(model.condition == ModelState.LOADING for model in registry.models())
            why = "Loading model" if is_loading else f"The server is {status}"  # llama.cpp's clients show this text
            readiness["error"] = {"code": 503, "message": why, "type": "unavailable_error"}
        return JSONResponse(readiness, 200 if registry.ready else 503)

    @routes.get("/v2/models/{model:path}/ready", response_class=Response, include_in_schema=False)
    async def model_ready(request: Request, model: str) -> Response:
        """Answer 200 if the model accepts requests, and otherwise 400, as Triton does."""
        seen = context.models_for(request)
        found = next((one for one in seen.models() if model in seen.names_of(one)), None)
        return Response(status_code=200 if found is not None and found.is_serving and not registry.leaving else 400)

    @routes.get("/ping", response_class=Response, include_in_schema=False)
    @routes.post("/ping", response_class=Response, include_in_schema=False)
    async def ping() -> Response:
        """Answer SageMaker's health check with the status of `/health/ready` and no body."""
        return Response(status_code=200 if registry.ready else 503)

    @routes.get("/load", responses=gives(Load))
    async def load() -> JSONResponse:
        """Return how many requests the models have now, as vLLM does. Requests of batches are not counted."""
        found: Load = {"server_load": sum(model.num_requests for model in registry.models())}
        return JSONResponse(found)

    @routes.get("/version", responses=gives(Version))
    async def get_version() -> JSONResponse:
        """Return the version of this server."""
        running: Version = {"version": distribution_version(), "name": "relaxserve"}
        return JSONResponse(running)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics as Prometheus text. The metrics name all models, so a key that may use only some models is refused."""
        who = caller(request)
        if who.access is Access.KEY and who.limits.models:
            raise ApiError(KEY_RESTRICTED, "the metrics name all models, and the key may use only some; use another key, or open_metrics")
        return Response(await registry.measuring.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


def distribution_version() -> str:
    """Return the version of this package, or "0" if the package is not installed."""
    try:
        return version("relaxserve")
    except PackageNotFoundError:  # the server runs from a checkout that was never installed
        return "0"
