"""Replicas for tests of the ingress: HTTP servers that follow scripts, and a client that asks them through a passage, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp (the extra ray)")

from aiohttp import ClientSession, web  # noqa: E402
from starlette.datastructures import Headers  # noqa: E402

from deploy.ray.body import receive  # noqa: E402
from deploy.ray.open_requests import OpenRequests  # noqa: E402
from deploy.ray.passage import Passage  # noqa: E402
from deploy.ray.wish import (  # noqa: E402
    Lease,
    Wish,
    read,
)
from deploy.replicas.session import new_session  # noqa: E402
from server.open_values import HEADER  # noqa: E402

CHAT = "/v1/chat/completions"
SSE = {"content-type": "text/event-stream", HEADER: "fp_1"}
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Replicas:
    """Scripted replicas, which are lent in turn. A script stands for one request."""

    urls: list[str] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    moved: dict[str, str] = field(default_factory=dict)  # the replica that stores a response, by the id of the response

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.raw_path, {name.lower(): value for name, value in request.headers.items()}, await request.read()))
        return await self.scripts[min(len(self.seen), len(self.scripts)) - 1](request)

    async def borrow(self, wish: Wish) -> Lease | None:
        self.wishes.append(wish)
        at = (len(self.wishes) - 1) % len(self.urls)
        return Lease(f"r{at}", self.urls[at], f"key-of-r{at}")


@asynccontextmanager
async def replicas(*scripts: Script, num: int = 2) -> AsyncIterator[Replicas]:
    made = Replicas(scripts=list(scripts))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    for _ in range(num):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    try:
        yield made
    finally:
        await runner.cleanup()


@dataclass
class Client:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.is_whole = not message.get("more_body", False)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def ask(
    made: Replicas,
    *,
    method: str = "POST",
    path: str = CHAT,
    body: bytes = b"{}",
    patience_s: float = 30.0,
    client: Client | None = None,
    **headers: str,
) -> Client:
    client = client or Client()
    async with new_session() as session:
        passage = await passage_of(made, session, method, path, body, patience_s, headers)
        await passage({"type": "http"}, client.receive, client.send)
    return client


async def passage_of(
    made: Replicas, session: ClientSession, method: str, path: str, body: bytes, patience_s: float, headers: Mapping[str, str]
) -> Passage:
    given = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    reading = read(method, path.partition("?")[0], given, await receive(_whole(body), given))
    return Passage(session, made.borrow, made.open_requests, method, path, given, body, reading, patience_s, made.moved.__setitem__)


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def streams(data: bytes, *, dies: bool = False, headers: dict[str, str] = SSE, pieces: int = 40) -> Script:
    async def script(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        for at in range(0, len(data), pieces):
            await answer.write(data[at : at + pieces])
        if dies:
            request.transport.abort()
        return answer

    return script


def answers(status: int, body: bytes, **headers: str) -> Script:
    async def script(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"content-type": "application/json", **headers})

    return script


async def dies(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(work)
