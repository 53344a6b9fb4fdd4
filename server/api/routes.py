"""How routers are made here: with JSON as the standard has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute


def new_router(tag: str, *, prefix: str = "") -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=_StrictJsonRoute)


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
