"""An answer on its way out: as events, or as one JSON text. Either way a client that leaves ends the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request, Response

from server.api.fields import ignored_header
from server.api.sse import EventStream
from server.errors import CLIENT_CLOSED, ApiError
from server.model import Loaded
from server.settings import ServerSettings

T = TypeVar("T")


class Answer(Protocol):
    async def whole(self) -> bytes: ...

    def chunks(self) -> AsyncGenerator[bytes, None]: ...


async def respond(request: Request, answer: Answer, headers: dict[str, str], *, stream: bool, settings: ServerSettings) -> Response:
    if stream:
        return EventStream(answer.chunks(), headers, heartbeat_s=settings.heartbeat_s)
    return Response(await while_connected(request, answer.whole()), headers=headers, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_answer(value: object, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def response_headers(loaded: Loaded, ignored: list[str]) -> dict[str, str]:
    return {**loaded.admission.headers(), **ignored_header(ignored)}


def fingerprint(loaded: Loaded) -> str:
    return f"fp_{loaded.ready.signature[:16]}"
