"""Stream answers as server-sent events. This is the only module that writes `data:`.

APIs differ in how events are framed, how errors are encoded and how a stream ends: see `Framing`.

A stream has one task that writes and one that watches for a disconnect. A client that has closed its sending half may have left, or may
still read the stream. Only a write shows which of the two is true, so such a client gets more frequent heartbeats. However a stream ends,
the generator of its payloads is closed. Unless the client has left, a stream whose headers were sent ends as its API requires, after an
error event if there was an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import INTERNAL, SHUTTING_DOWN, ApiError
from server.http.protocol import HALF_CLOSED, PROBE_S

log = logging.getLogger(__name__)

# Seconds for which the response headers wait for the first event, so that an early failure can still decide the HTTP status. In a framing
# without heartbeats (NDJSON), the headers wait for the first event, however late that comes: only interim answers (1xx) can show whether
# the client has left, and they must precede the headers. HTTP/1.0 has no interim answers, so its headers never wait longer than PATIENCE_S.
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API writes the events of a stream."""

    error: Callable[[ApiError], bytes] = ApiError.body  # encodes an error as a payload
    named: bool = False  # write a line `event: NAME` before a payload, which must begin with {"type":"NAME"
    end: bytes = b"data: [DONE]\n\n"  # ends the stream
    lines: bool = False  # send lines of JSON (NDJSON) instead of events

    @property
    def media_type(self) -> str:
        return "application/x-ndjson" if self.lines else "text/event-stream"

    @property
    def heartbeat(self) -> bytes:
        """The bytes that keep a silent connection open: a comment, or nothing in NDJSON."""
        return b"" if self.lines else b": still working\n\n"

    def frame(self, payload: bytes) -> bytes:
        """Return the bytes of an event."""
        if self.lines:
            return payload + b"\n"
        if not self.named:
            return b"data: " + payload + b"\n\n"
        return b"event: %b\ndata: %b\n\n" % (payload[NAME_AT : payload.index(b'"', NAME_AT)], payload)


NAME_AT = len(b'{"type":"')
CHUNKS = Framing()


class EventStream(Response):
    """A streamed response with one event for each of `payloads`. Each payload is a complete JSON text."""

    def __init__(
        self, payloads: AsyncGenerator[bytes, None], headers: Mapping[str, str], *, heartbeat_s: float, framing: Framing = CHUNKS
    ) -> None:
        """`heartbeat_s`: seconds of silence after which bytes are sent that keep the connection open."""
        super().__init__(media_type=framing.media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._payloads = payloads
        self._framing = framing
        self._heartbeat_s = heartbeat_s
        self._request_id = ""
        self._started = False
        self._ended = False
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client leaves, with heartbeats while no event comes. If the server stops, end the stream
        with an error event."""
        self._request_id = scope["relaxserve.caller"].request_id
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_disconnect(receive))
        half_closed = asyncio.ensure_future(_set(scope.get(HALF_CLOSED)))
        waited, heartbeat_s = {writer, gone, half_closed}, self._heartbeat_s
        has_heartbeats = self._framing.heartbeat or scope["http_version"] == "1.0"
        try:
            await asyncio.wait((writer, gone), timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            while not (writer.done() or gone.done()):
                if half_closed.done():
                    waited, heartbeat_s = {writer, gone}, min(PROBE_S, self._heartbeat_s)
                silent_s = time.monotonic() - self._sent_s
                if has_heartbeats and (silent_s >= heartbeat_s or not self._started):
                    await self._send(send, self._framing.heartbeat)
                await asyncio.wait(waited, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                await writer
        except asyncio.CancelledError:
            # The server stops, and this stream did not end in time. End the writer first, so that nothing follows the end of the stream.
            await _end(writer)
            if self._started and not (self._ended or gone.done()):
                await self._send(send, self._error(ApiError(SHUTTING_DOWN, "the server stops")) + self._framing.end, more_body=False)
            raise
        finally:
            await _end(writer, gone, half_closed)

    async def _write(self, send: Send) -> None:
        """Send all events, and the end of the stream. Raise an error that occurs before the headers are sent; a later error becomes an
        event."""
        payloads = self._payloads
        try:
            async for payload in payloads:
                await self._send(send, self._framing.frame(payload))
                await asyncio.sleep(0)  # a step may bring a hundred events; let other tasks run between them
        except ApiError as error:
            if not self._started:
                raise
            await self._send(send, self._error(error))
        except Exception:
            if not self._started:
                raise
            log.exception("the stream of request %s failed", self._request_id)
            error = ApiError(INTERNAL, f"the server failed on this request; its log has the cause under {self._request_id}")
            await self._send(send, self._error(error))
        finally:
            await payloads.aclose()
        await self._send(send, self._framing.end, more_body=False)

    def _error(self, error: ApiError) -> bytes:
        """Return the bytes of an error event."""
        return self._framing.frame(self._framing.error(error))

    async def _send(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        """Send bytes of the body. Before the first bytes, send the headers."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_s = time.monotonic()
        self._ended = not more_body
        await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def _end(*tasks: asyncio.Future[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(work: Awaitable[None], receive: Receive) -> None:
    """Run `work`, which sends the answer. Cancel it if the client leaves."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _set(event: asyncio.Event | None) -> None:
    """Wait until an event is set. Without an event (the request comes from no connection), wait forever."""
    await (event or asyncio.Event()).wait()
