"""Send an answer as events, or as one JSON text. In either case, computing the answer ends when the client disconnects."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from server.api.answer.sse import CHUNKS, EventStream, Framing, until_disconnect
from server.api.request.fields import ignored_header
from server.errors import CLIENT_CLOSED, ApiError
from server.models.model import Loaded
from server.settings import ServerSettings

PIECE_BYTES = 256 << 10  # most bytes of a body that are sent at once
LEAST_PACKED_BYTES = 64 << 10  # smaller bodies are not compressed
LONG_BYTES = 32 << 10  # longer pieces are compressed on a thread, so that other tasks do not wait
# finds gzip or `*` in a header `Accept-Encoding`, if its weight is not 0
GZIP = re.compile(r"(?:^|,)\s*(?:gzip|\*)\s*(?:$|,|;(?!\s*q=0(?:\.0*)?\s*(?:$|,)))")
T = TypeVar("T")


class Answer(Protocol):
    """An answer that can be sent as a whole or in chunks."""

    async def whole(self) -> list[bytes]:
        """Return the answer as pieces of JSON."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer. Each is JSON."""
        ...


async def respond(
    request: Request, answer: Answer, headers: dict[str, str], *, stream: bool, settings: ServerSettings, framing: Framing = CHUNKS
) -> Response:
    """Return the response with an answer: as events framed by `framing` if `stream`, otherwise as a whole. Raise ApiError if the client
    leaves before a whole answer is complete, or if a whole answer fails."""
    if stream:
        return EventStream(answer.chunks(), headers, heartbeat_s=settings.heartbeat_s, framing=framing)
    return Pieces(await while_connected(request, answer.whole()), headers)


class Pieces(Response):
    """An HTTP response whose JSON body is sent in pieces, so that a large body is never copied as a whole. A long piece is sent in parts,
    between which other tasks run. A large body is compressed if the client accepts gzip."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], headers: Mapping[str, str]) -> None:
        """`pieces` are joined without anything between them. The response empties this list while it sends the pieces."""
        super().__init__(headers={**headers, "content-length": str(sum(map(len, pieces)))})
        pieces.reverse()
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces, compressed if they have at least LEAST_PACKED_BYTES and the client accepts gzip."""
        accepted = Headers(scope=scope).get("accept-encoding", "")
        pack = None
        if int(self.headers["content-length"]) >= LEAST_PACKED_BYTES and GZIP.search(accepted):
            pack = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)  # 16: write gzip's header
            del self.headers["content-length"]
            self.headers["content-encoding"] = "gzip"
        self.headers["vary"] = "accept-encoding"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            piece = self._pieces.pop()  # free each piece after use, because freeing a large answer at once takes long
            for at in range(0, len(piece), PIECE_BYTES):
                part = piece[at : at + PIECE_BYTES]
                if pack is not None:
                    part = await asyncio.to_thread(pack.compress, part) if len(part) > LONG_BYTES else pack.compress(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if len(piece) > PIECE_BYTES:
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"" if pack is None else pack.flush(), "more_body": False})


def in_pieces(answer: Mapping[str, object], name: str, entries: Iterable[bytes]) -> list[bytes]:
    """Return an answer as pieces of JSON. `entries` are the encoded items of its list `name`, which is empty in `answer`. Encoding a long
    list in one call would delay other requests."""
    mark = b'"%b":[' % name.encode()
    head, _, tail = msgspec.json.encode(answer).partition(mark)
    return [head + mark, *((b"," if index else b"") + entry for index, entry in enumerate(entries)), tail]


class Client(Protocol):
    """An object with the ASGI function `receive` of a request, such as a Request or a Caller."""

    @property
    def receive(self) -> Receive: ...


async def while_connected(client: Client, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ApiError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(client.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def json_answer(value: object, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def response_headers(loaded: Loaded, ignored: list[str]) -> dict[str, str]:
    """Return the headers of an answer: how much room the model's queue has, and which fields of the request the server has `ignored`."""
    return {**loaded.admission.headers(), **ignored_header(ignored)}
