"""Adapt uvicorn's answers in three cases: WebSockets, clients of HTTP/1.0, and answers that begin before the whole body has arrived."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

SWITCHING = 101  # the status of an answer that becomes a WebSocket
UPGRADED = "relaxserve.upgraded"  # key of a scope; true: the request asks to become a WebSocket, and all bytes after its head are its body


def framed(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Return the application with a `send` that adapts the answer if the request asks to become a WebSocket or is of HTTP/1.0, or if the
    answer begins before the whole body has arrived. The cycle, uvicorn's object for a request, must not refer to this `send`, which refers
    to the cycle: only the garbage collector could then free the two, and its runs pause the event loop."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        send = _upgrading(cycle, send) if scope[UPGRADED] else _closing_early(cycle, send)
        await app(scope, receive, _without_chunks(cycle, send) if scope["http_version"] == "1.0" else send)  # type: ignore[arg-type]

    return answer  # type: ignore[return-value]  # uvicorn's types of messages are narrower


def _closing_early(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` that closes the connection after an answer that begins before the whole body has arrived."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    return send_and_close


def _upgrading(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` for a request that asks to become a WebSocket. After the status 101, bytes are sent as they are. In any case, the
    connection closes after the answer."""
    is_upgraded, send_part = False, _without_length(cycle, send)

    async def send_raw(message: Message) -> None:
        nonlocal is_upgraded
        if message["type"] == "http.response.start":
            is_upgraded = message["status"] == SWITCHING
            cycle.keep_alive = is_upgraded  # if true, uvicorn does not add `connection: close`
            cycle.chunked_encoding = False if is_upgraded else None
            await send(message)
        elif is_upgraded:
            cycle.keep_alive = False
            await send_part(message)
        else:
            await send(message)

    return send_raw


def _without_chunks(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` for HTTP/1.0, which has no chunked encoding. An answer without a length ends when the connection closes. After an
    answer with a length, the connection stays open only if the client asked for that; a header then tells the client that it stays open."""
    is_measured, send_part = True, _without_length(cycle, send)

    async def send_plainly(message: Message) -> None:
        nonlocal is_measured
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            is_measured = b"content-length" in names
            if not is_measured:
                cycle.chunked_encoding = cycle.keep_alive = False
            elif cycle.keep_alive and b"connection" not in names:
                message = {**message, "headers": [*message["headers"], (b"connection", b"keep-alive")]}
            await send(message)
        elif is_measured:
            await send(message)
        else:
            await send_part(message)

    return send_plainly


def _without_length(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` for the parts of a body whose length no header states. uvicorn refuses a part that is longer than the length it still
    expects, so the expected length is set anew for each part. Several tasks may call this `send`."""
    turn = asyncio.Lock()

    async def send_part(message: Message) -> None:
        # uvicorn may wait for a slow reader before it compares the part with the expected length; no other task may change that length
        # meanwhile
        async with turn:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

    return send_part
