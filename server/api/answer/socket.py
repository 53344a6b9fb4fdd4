"""A WebSocket as the answer to a request: after the answer's head, both sides send messages until one of them closes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import BAD_REQUEST, ApiError
from server.http.protocol import UPGRADED
from server.http.websocket import CloseCode, Message, Opcode, Reader, WebSocketError, accept_of, close_frame, fault_of, frame

log = logging.getLogger(__name__)

PING_S = 20.0  # a silent client is asked for a sign of life after this time
SILENT_S = 60.0  # a client without a sign of life is gone after this time
WATCH_S = 1.0  # seconds between looks at whether the server stops
TURN = 32  # messages handled before other tasks may run


class Connection:
    """The messages of one WebSocket."""

    def __init__(self, receive: Receive, send: Send, most_bytes: int, is_stopping: Callable[[], bool]) -> None:
        self._receive, self._send, self._is_stopping = receive, send, is_stopping
        self._reader = Reader(most_bytes)

    async def send_text(self, text: bytes) -> None:
        await self.write(frame(Opcode.TEXT, text))

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def texts(self) -> AsyncGenerator[bytes, None]:
        """Yield the client's messages until it closes or disappears. Raise WebSocketError if the connection must be closed."""
        count = 0
        async for data in self._received():
            for message in self._reader.feed(data):
                count += 1
                if count % TURN == 0:
                    await asyncio.sleep(0)
                if message.opcode is Opcode.CLOSE:
                    return
                text = await self._text_of(message)
                if text is not None:
                    yield text

    async def _text_of(self, message: Message) -> bytes | None:
        match message.opcode:
            case Opcode.PING:
                await self.write(frame(Opcode.PONG, message.data))
            case Opcode.BINARY:
                raise WebSocketError(CloseCode.UNSUPPORTED_DATA, "a message is binary; expected JSON as text")
            case Opcode.TEXT:
                return message.data
            case _:
                pass
        return None

    async def _received(self) -> AsyncGenerator[bytes, None]:
        """Yield received bytes until the client has gone."""
        heard_s = pinged_s = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(WATCH_S):
                    event = await self._receive()
            except TimeoutError:
                now_s = time.monotonic()
                if self._is_stopping():
                    raise WebSocketError(CloseCode.GOING_AWAY, "the server stops") from None
                if now_s - heard_s > SILENT_S:
                    return
                if now_s - max(heard_s, pinged_s) > PING_S:
                    pinged_s = now_s
                    await self.write(frame(Opcode.PING))
                continue
            if event["type"] == "http.disconnect":
                return
            heard_s = time.monotonic()
            yield event.get("body", b"")


class WebSocket(Response):
    """An answer that becomes a WebSocket, which `serve` uses until it returns. Messages of the client may have `most_bytes`."""

    def __init__(
        self, request: Request, serve: Callable[[Connection], Awaitable[None]], *, most_bytes: int, is_stopping: Callable[[], bool]
    ) -> None:
        """Raise ApiError if the request does not ask for a WebSocket."""
        headers = request.headers
        fault = fault_of(headers) if request.scope.get(UPGRADED) else "the request asks for no upgrade; send `Upgrade: websocket`"
        if fault:
            raise ApiError(BAD_REQUEST, f"{request.url.path} is a WebSocket, and {fault}")
        asked = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",") if name.strip()]
        chosen = {"sec-websocket-protocol": asked[0]} if asked else {}  # further ones may be keys
        accept = accept_of(headers["sec-websocket-key"])
        super().__init__(
            status_code=101, headers={"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": accept, **chosen}
        )
        del self.headers["content-length"]
        self._serve, self._most_bytes, self._is_stopping = serve, most_bytes, is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        connection = Connection(receive, send, self._most_bytes, self._is_stopping)
        code, reason = CloseCode.INTERNAL, "the server failed; its log has the cause"
        try:
            await self._serve(connection)
            code, reason = CloseCode.NORMAL, ""
        except WebSocketError as error:
            code, reason = error.code, error.reason
        except asyncio.CancelledError:
            code, reason = CloseCode.GOING_AWAY, "the server stops"
            raise
        except Exception:
            log.exception("the WebSocket of request %s failed", scope["relaxserve.caller"].request_id)
        finally:
            with suppress(OSError):
                await connection.write(close_frame(code, reason), more=False)
