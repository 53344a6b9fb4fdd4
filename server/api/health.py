"""Whether the process lives, whether it should get requests, what it is, and its metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from server.api.context import Context
from server.api.routes import new_router


def router(context: Context) -> APIRouter:
    routes = new_router("Operation")
    registry = context.registry

    @routes.head("/health/live", include_in_schema=False)  # as some load balancers ask
    @routes.get("/health/live")
    @routes.get("/v2/health/live", include_in_schema=False)
    async def live() -> JSONResponse:
        """200 while the process answers at all."""
        return JSONResponse({"status": "ok"})

    @routes.head("/health", include_in_schema=False)
    @routes.head("/health/ready", include_in_schema=False)
    @routes.get("/health")
    @routes.get("/health/ready")
    @routes.get("/v2/health/ready", include_in_schema=False)
    async def ready() -> JSONResponse:
        """200 when requests should be sent here, 503 while loading, draining, or without a working model."""
        models = {model.spec.name: model.condition for model in registry.models()}
        status = "ok" if registry.ready else "shutting down" if registry.closing else "unavailable"
        return JSONResponse({"status": status, "models": models}, 200 if registry.ready else 503)

    @routes.get("/version")
    async def get_version() -> JSONResponse:
        """What runs here."""
        return JSONResponse({"version": distribution_version(), "name": "relaxserve"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


def distribution_version() -> str:
    try:
        return version("relaxserve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
