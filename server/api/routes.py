"""Make routers that accept only strict JSON. Routers of the administration check the caller's access a second time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from server.api.context import caller
from server.errors import ADMIN_KEY_REQUIRED, ApiError, ErrorBody
from server.http.auth import Access

ADMINISTRATION = "Administration"
COMPONENTS = "#/components/schemas/{model}"
Schema = dict[str, Any]
Responses = dict[int | str, Schema]


def new_router(tag: str, *, prefix: str = "", error_shape: type = ErrorBody) -> APIRouter:
    """Return a router for endpoints that `/docs` shows under `tag`. `error_shape` is the shape of their errors. Routes with the tag
    ADMINISTRATION are only for admins."""
    error = gives(error_shape)[200]
    errors: Responses = {
        "4XX": {**error, "description": "The request is invalid or was refused."},
        "5XX": {**error, "description": "The server failed, or has no capacity or no time left."},
    }
    guards = [Depends(_only_for_admins)] if tag == ADMINISTRATION else []
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=_StrictJsonRoute,
        dependencies=guards,
        responses=errors,
        strict_content_type=False,  # Ollama's clients send no content type; the gateway refuses pages of other sites
    )


def gives(*shapes: type | Schema, event: type | None = None, status: int = 200, done: bool = True) -> Responses:
    """Describe a route's answer for /openapi.json. The answer has one of `shapes`. If the answer is a stream, its events have the shape
    `event`, and with `done` the event `[DONE]` ends the stream."""
    one_of = [shape if isinstance(shape, dict) else schema_of(shape) for shape in shapes]
    answer = {"application/json": {"schema": one_of[0] if len(one_of) == 1 else {"anyOf": one_of}}}
    return {status: {"content": answer if event is None else {**answer, **events(event, done=done)}}}


def events(event: type, *, done: bool = True) -> Schema:
    """Describe a stream of events for /openapi.json. With `done`, the event `[DONE]` ends the stream."""
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema_of(event)}
    data = {"anyOf": [data, {"const": "[DONE]"}]} if done else data
    return {"text/event-stream": {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


def schema_of(shape: type) -> Schema:
    """Return a reference to a shape's JSON schema. `description.py` adds the schema when /openapi.json is requested, because generating all
    schemas takes longer than making the routes."""
    return {"$ref": COMPONENTS.format(model=shape.__name__)}


async def _only_for_admins(request: Request) -> None:
    """Raise ApiError unless the caller has admin access. The gateway has checked access by the path already; this second check covers
    paths that the gateway classified wrongly."""
    if caller(request).access is not Access.ADMIN:
        raise ApiError(ADMIN_KEY_REQUIRED, f"{request.url.path} needs an admin key")


class _StrictJsonRequest(Request):
    """A request that refuses JSON with NaN or lone surrogates, because later steps would fail on these values."""

    async def json(self) -> Any:
        """Parse the body and return its value. Raise JSONDecodeError if the body is not strict JSON, or is nested too deeply."""
        try:
            value = msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        await asyncio.sleep(0)  # let other tasks run between this long call and the validation, which is long too
        return value


class _StrictJsonRoute(APIRoute):
    """A route whose endpoint gets a `_StrictJsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of FastAPI for this route, with strict JSON in its requests."""
        handle = super().get_route_handler()

        async def with_strict_json(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return with_strict_json


def is_known(request: Request, etag: str) -> bool:
    """Return whether the client has the version of a file with this tag. The request's header `If-None-Match` lists the tags of the
    versions that the client has."""
    return etag in {text.strip().removeprefix("W/") for text in request.headers.get("if-none-match", "").split(",")}
