"""Answer a request with a WebSocket: after the answer's head, both sides send messages until one of them closes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import BAD_REQUEST, ApiError
from server.http.answer_framing import UPGRADED
from server.http.auth import SOCKET_KEY
from server.http.websocket import CloseCode, Message, Opcode, Reader, WebSocketError, accept_of, close_frame, fault_of, frame

log = logging.getLogger(__name__)

PING_S = 20.0  # a client that has sent nothing for this time gets a ping
SILENT_S = 60.0  # a client that has sent nothing for this time, not even a pong, is disconnected
WATCH_S = 1.0  # seconds between checks of the limits and of whether the server stops, while the client sends nothing
TURN = 32  # frames handled before other tasks may run
NO_UPGRADE = "the request asks for no upgrade; send `Upgrade: websocket`, and let a proxy in between pass on Upgrade and Connection"


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """The limits of one WebSocket."""

    most_bytes: int  # bytes of the largest message
    message_s: float  # seconds within which a message must arrive as a whole
    open_s: float  # most seconds for which the connection stays open


class Connection:
    """One WebSocket: sends and receives its messages."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: SocketLimits,
        is_stopping: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_stopping` tells whether the server stops. `now_s` returns the time in seconds, by which the time limits are checked."""
        self._receive, self._send, self._is_stopping = receive, send, is_stopping
        self._limits, self._now_s, self._opened_s = limits, now_s, now_s()
        self._reader = Reader(limits.most_bytes, now_s)

    async def send_text(self, text: bytes) -> None:
        """Send a message."""
        await self.write(frame(Opcode.TEXT, text))

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send the bytes of one or more frames. `more`: further frames will follow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def texts(self, hold: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
        """Yield the client's text messages until the client closes the WebSocket or disconnects, and answer the client's pings. Raise
        WebSocketError if the connection must be closed. Whenever bytes have arrived, `hold` is called with the number of bytes of the
        incomplete message. An error that `hold` raises ends the iteration."""
        count = 0
        async with aclosing(self._received()) as received:
            async for data in received:
                for message in self._reader.feed(data):
                    count += 1
                    if count % TURN == 0:
                        await asyncio.sleep(0)
                    if message is None:
                        continue
                    if message.opcode is Opcode.CLOSE:
                        return
                    text = await self._text_of(message)
                    if text is not None:
                        yield text
                hold(self._reader.num_bytes)

    async def _text_of(self, message: Message) -> bytes | None:
        """Return the text of a message, or None if it has none. Answer a ping. Raise WebSocketError for a binary message."""
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
        """Yield received bytes until the client has disconnected. Ping a client that is silent. Raise WebSocketError if the connection must
        be closed."""
        heard_s = pinged_s = self._now_s()
        while True:
            self._check()
            try:
                async with asyncio.timeout(WATCH_S):
                    event = await self._receive()
            except TimeoutError:
                now_s = self._now_s()
                if now_s - heard_s > SILENT_S:
                    raise WebSocketError(CloseCode.POLICY, f"the client has been silent for {SILENT_S:g} s; answer pings") from None
                if now_s - max(heard_s, pinged_s) > PING_S:
                    pinged_s = now_s
                    await self.write(frame(Opcode.PING))
                continue
            if event["type"] == "http.disconnect":
                return
            yield event.get("body", b"")
            heard_s = self._now_s()  # read the clock again, because handling the messages may have taken long

    def _check(self) -> None:
        """Raise WebSocketError if a limit is exceeded, or if the server stops."""
        limits, now_s, begun_s = self._limits, self._now_s(), self._reader.begun_s
        if self._is_stopping():
            raise WebSocketError(CloseCode.GOING_AWAY, "the server stops")
        if now_s - self._opened_s > limits.open_s:
            raise WebSocketError(CloseCode.GOING_AWAY, f"the session has lasted {limits.open_s / 60:g} minutes; connect again")
        if begun_s is not None and now_s - begun_s > limits.message_s:
            raise WebSocketError(CloseCode.POLICY, f"a message did not arrive whole within {limits.message_s:g} s")


class WebSocket(Response):
    """A response that turns the connection into a WebSocket and calls `serve` with it. When `serve` returns or raises an error, send a
    close frame with the reason, and end the connection."""

    def __init__(
        self, request: Request, serve: Callable[[Connection], Awaitable[None]], *, limits: SocketLimits, is_stopping: Callable[[], bool]
    ) -> None:
        """`is_stopping` tells whether the server stops. Raise ApiError if the request does not ask for a WebSocket."""
        headers = request.headers
        fault = fault_of(headers) if request.scope.get(UPGRADED) else NO_UPGRADE
        if fault:
            raise ApiError(BAD_REQUEST, f"{request.url.path} is a WebSocket, and {fault}")
        asked = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",") if name.strip()]
        open_names = [name for name in asked if not name.startswith(SOCKET_KEY)]
        chosen = {"sec-websocket-protocol": open_names[0]} if open_names else {}
        accept = accept_of(headers["sec-websocket-key"])
        super().__init__(
            status_code=101, headers={"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": accept, **chosen}
        )
        del self.headers["content-length"]
        self._serve, self._limits, self._is_stopping = serve, limits, is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head of the answer, call `serve`, and close the connection. Log an unexpected error, which is neither a WebSocketError
        nor the cancellation."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        connection = Connection(receive, send, self._limits, self._is_stopping)
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
