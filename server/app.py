"""Build the HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match, Route

from server.api import endpoints, health
from server.api.answer.respond import json_answer
from server.api.context import Context
from server.api.description import describe_answers
from server.api.request.fields import UNKNOWN_TYPE
from server.api.request.validators import build_validators
from server.audio.decoder import held_audio
from server.batches.service import Batches
from server.errors import (
    BAD_REQUEST,
    INVALID_JSON,
    INVALID_VALUE,
    METHOD_NOT_ALLOWED,
    MISSING_FIELD,
    NOT_FOUND_PATH,
    ApiError,
    ErrorKind,
)
from server.history import History
from server.http.auth import Guard
from server.http.gateway import Gateway, error_response
from server.http.kept_requests import KeptRequests
from server.http.record import Watcher
from server.models.registry import Registry
from server.settings import ServerSettings

OF_STATUS: dict[int, ErrorKind] = {404: NOT_FOUND_PATH, 405: METHOD_NOT_ALLOWED}


def create_app(settings: ServerSettings, registry: Registry, watchers: Sequence[Watcher] = ()) -> FastAPI:
    """Return the application with all endpoints. Each of `watchers` is called with the record of each request that has ended, and is closed
    when the application stops."""
    kept = None if settings.keep_requests is None else KeptRequests(settings.keep_requests, settings.keep_requests_of)
    batches = Batches(settings, registry)
    history = History(registry.metrics.watched, registry.measuring.measure)
    context = Context(settings, registry, batches, history, held_audio(settings.max_held_audio_bytes), kept)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        """At the start, begin to load models and continue batches. At the end, stop everything, and close `watchers` and `kept`."""
        await registry.open()
        await batches.open(app)
        beside = asyncio.create_task(history.run()), asyncio.create_task(build_validators())
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await batches.close()
            await registry.close()
            await asyncio.gather(*(asyncio.to_thread(closing.close) for closing in (*watchers, *([] if kept is None else [kept]))))

    app = FastAPI(
        title="relaxserve",
        version=health.distribution_version(),
        lifespan=lifespan,
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
        redirect_slashes=False,  # clients handle a redirected POST worse than an error
    )
    routers = endpoints.routers(context)
    for router in routers:
        app.router.routes.extend(router.routes)  # FastAPI's include_router would build all routes a second time
    describe_answers(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def describe() -> Response:
        return json_answer(await asyncio.to_thread(app.openapi))  # the first call builds the description and takes a while

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(
        Gateway,
        settings=settings,
        guard=Guard(settings),
        metrics=registry.metrics,
        error_shapes=endpoints.error_shapes(),
        watchers=watchers,
        kept=kept,
        is_leaving=lambda: registry.leaving or registry.closing,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],  # scripts of web pages read many of the headers, for example x-should-retry
        )
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    """Answer with the error that an endpoint has raised."""
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Answer with an error for the first fault that validation has found. If a field is at fault, `param` is its path in the body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return error_response(ApiError(INVALID_JSON, f"the body is not JSON: {first['ctx']['error']}"), request.scope)
    param = _path(first["loc"])
    if not param:
        return error_response(_no_object(request, first), request.scope)
    if kind == UNKNOWN_TYPE:
        message = f"{param}.type is {first['ctx']['found']!r}; expected {first['ctx']['known']}"
        return error_response(ApiError(INVALID_VALUE, message, param=f"{param}.type"), request.scope)
    if kind == "missing":
        return error_response(ApiError(MISSING_FIELD, f"{param} is absent and required", param=param), request.scope)
    value = _shown(first.get("input"))
    return error_response(ApiError(INVALID_VALUE, f"{param} is {value}: {message}", param=param), request.scope)


def _no_object(request: Request, found: Mapping[str, Any]) -> ApiError:
    """Return the error for a body that was not read as a JSON object: it is empty, its content type is not JSON, or it is a JSON value of
    another type."""
    if found["type"] == "missing":
        return ApiError(INVALID_JSON, "the body is empty; expected a JSON object")
    declared = request.headers.get("content-type", "application/json")
    if "json" not in declared.lower():
        return ApiError(INVALID_JSON, f"content-type is {declared!r:.80}; expected application/json")
    return ApiError(INVALID_JSON, f"the body is {_shown(found.get('input'))}; expected a JSON object")


def _shown(value: object) -> str:
    """Return a value as an error shows it: at most 80 characters of a text or a number, and only the size of a list or an object. So no
    large value is formatted as a whole."""
    match value:
        case str():
            return f"{value[:80]!r:.80}"
        case list():
            return f"a list of {len(value)}" if value else "[]"
        case dict():
            return f"an object of {len(value)} fields" if value else "{}"
        case _:
            return f"{value!r:.80}"


def _path(location: tuple[str | int, ...]) -> str:
    """Return a path such as `messages[0].content` for the location of a fault, or an empty text for the whole body. Leave out the first
    part, which is `body`, and the names of union members that pydantic adds: names of simple types, and texts that are no identifiers."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "constrained"):
            path += f".{part}" if path else part
    return path


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the framework. Usually the path does not exist, or it does not accept the method."""
    assert isinstance(error, HTTPException)
    kind = OF_STATUS.get(error.status_code, BAD_REQUEST)
    path = request.url.path
    if kind is NOT_FOUND_PATH:
        near = _near(request)
        message = f"there is nothing at {path:.200}; {f'did you mean {near}?' if near else 'see /docs'}"
    elif kind is METHOD_NOT_ALLOWED:
        allowed = _allowed(request)
        message = f"{path:.200} does not accept {request.method}; expected {allowed}"
        return error_response(ApiError(kind, message, headers={"allow": allowed}), request.scope)
    else:
        message = f"{request.method} {path:.200}: {error.detail}"
    return error_response(ApiError(kind, message, headers=dict(error.headers or {})), request.scope)


def _allowed(request: Request) -> str:
    """Return the methods of all routes at this path, separated by commas, with HEAD if there is GET. The framework's error lists only the
    methods of the first route."""
    routes: list[BaseRoute] = request.app.routes
    found = [route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in found for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _near(request: Request) -> str | None:
    """Return the existing path that is most similar to the requested one, or None if no path is similar. Clients often leave out /v1,
    repeat it, or add a slash."""
    routes: list[BaseRoute] = request.app.routes
    paths = [route.path for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    return next(iter(get_close_matches(request.url.path[:200], paths, n=1, cutoff=0.75)), None)
