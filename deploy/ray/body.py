"""Receive the body of a request, and decode what the ingress reads of it: the fields of a JSON object, or the short fields of a form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from server.api.request.uploads import SLOWEST
from server.errors import BODY_TOO_LARGE, REQUEST_TIMEOUT, ApiError
from server.http.content_encoding import PLAIN, decoder
from server.http.json_scan import PIECE_BYTES, JsonScan
from server.http.multipart import FORM_TYPE, Form

MOST_BODY_BYTES = 64 << 20  # servers have limits of their own
BODY_S = 30.0  # seconds within which a body must arrive, plus 1 s for each SLOWEST bytes of it
FILE = "file"  # the field of a form whose bytes are not read


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request, and what the ingress has decoded of it."""

    content: bytes = b""  # as the client sent it
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # empty if the body is no JSON object and no form, or not decoded
    is_decoded: bool = True  # False: the fields are unknown, because the body takes long to decode or is compressed wrongly


async def receive(pieces: AsyncIterable[bytes], headers: Mapping[str, str]) -> Body:
    """Receive and decode a body. Raise ApiError if it has more than MOST_BODY_BYTES, or does not arrive in time."""
    content, began_s = bytearray(), asyncio.get_running_loop().time()
    is_form = headers.get("content-type", "").lower().startswith(FORM_TYPE)
    reader = None if is_form else _JsonReader(headers.get("content-encoding", ""))
    try:
        async with asyncio.timeout(BODY_S) as limit:
            async for piece in pieces:
                content += piece
                if len(content) > MOST_BODY_BYTES:
                    raise ApiError(BODY_TOO_LARGE, f"the body is larger than {MOST_BODY_BYTES} bytes")
                limit.reschedule(began_s + BODY_S + len(content) / SLOWEST)
                if reader is not None:
                    await reader.feed(piece)
    except TimeoutError:
        text = f"after {len(content)} bytes, the body is late; expected all of it within {BODY_S:g} s and 1 s more for each {SLOWEST} bytes"
        raise ApiError(REQUEST_TIMEOUT, f"{text}: send it faster") from None
    whole = bytes(content)
    fields = await _form_fields(whole, headers["content-type"]) if reader is None else await reader.fields(whole)
    return Body(whole, fields or {}, is_decoded=fields is not None)


class _JsonReader:
    """Decodes a JSON text, unless that would take long or the text is compressed wrongly. Such a text goes to the server as it is, and the
    server answers it."""

    def __init__(self, encoding: str) -> None:
        self._scan = JsonScan()
        self._text = None if encoding.strip().lower() in PLAIN else bytearray()  # the decoded text so far if the body is compressed
        self._is_readable = True
        try:
            self._decode = decoder(encoding)
        except ApiError:
            self._is_readable = False

    async def feed(self, data: bytes, *, is_last: bool = False) -> None:
        """Take the next piece of the body: decompress it if the body is compressed, and count its values. Once a piece has a fault, ignore
        all later pieces. `is_last`: nothing follows `data`."""
        if not self._is_readable:
            return
        try:
            for num_taken, piece in enumerate(self._decode(data, is_last)):
                if num_taken:
                    await asyncio.sleep(0)  # other requests go on
                self._scan.feed(piece)
                if self._text is not None:
                    self._text += piece
                    if len(self._text) > MOST_BODY_BYTES:
                        raise ApiError(BODY_TOO_LARGE, f"the decoded body is larger than {MOST_BODY_BYTES} bytes")
        except ApiError:
            self._is_readable = False

    async def fields(self, content: bytes) -> dict[str, Any] | None:
        """Return the fields: an empty dict if the text is no JSON object, None if the text was not decoded. `content`: the body."""
        if content:
            await self.feed(b"", is_last=True)
        if not self._is_readable:
            return None
        try:
            found = msgspec.json.decode(content if self._text is None else self._text)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


async def _form_fields(content: bytes, content_type: str) -> dict[str, Any]:
    """Return the fields of a form except its file. If the form is wrong, return the fields before the error; the server reports the
    error."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), PIECE_BYTES):
            yield content[at : at + PIECE_BYTES]
            await asyncio.sleep(0)  # other requests go on

    try:
        form = Form(content_type, lambda _data: None)
    except ApiError:
        return {}
    with suppress(ApiError):
        await form.read(pieces(), FILE)
    return dict(form.fields)
