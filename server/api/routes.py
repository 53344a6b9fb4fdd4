"""How routers are made here: with JSON as the standard has it, and the administration closed twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from server.api.context import caller
from server.auth import Access
from server.errors import ADMIN_KEY_REQUIRED, ApiError, ErrorBody

ADMINISTRATION = "Administration"
Responses = dict[int | str, dict[str, Any]]


ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault."},
    "5XX": {"model": ErrorBody, "description": "The server is, or has no room, or no time left."},
}


def new_router(tag: str, *, prefix: str = "") -> APIRouter:
    guards = [Depends(_only_for_admins)] if tag == ADMINISTRATION else []
    return APIRouter(prefix=prefix, tags=[tag], route_class=_StrictJsonRoute, dependencies=guards, responses=ERRORS)


def gives(shape: object, *, event: type | None = None, status: int = 200) -> Responses:
    """What a route says of its answer, and of the events that a stream of it has instead."""
    return {status: {"model": shape, "content": {} if event is None else events(event)}}


def events(event: type) -> dict[str, Any]:
    """The content of a stream; `description.py` adds the shape."""
    shape = {"$ref": f"#/components/schemas/{event.__name__}"}
    json_or_end = [{"type": "string", "contentMediaType": "application/json", "contentSchema": shape}, {"const": "[DONE]"}]
    return {"text/event-stream": {"itemSchema": {"type": "object", "properties": {"data": {"anyOf": json_or_end}}, "required": ["data"]}}}


async def _only_for_admins(request: Request) -> None:
    """The gateway judges paths before there is a route. Should it ever take an admin's path for another's, this stops it."""
    if caller(request).access is not Access.ADMIN:
        raise ApiError(ADMIN_KEY_REQUIRED, f"{request.url.path} needs an admin key")


class _StrictJsonRequest(Request):
    """No NaN, no lone surrogates: nothing that a later step would trip over."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except msgspec.MsgspecError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class _StrictJsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_strict_json(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return with_strict_json
