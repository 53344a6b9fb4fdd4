"""Decode the body of a request as it arrives: with a declared length, or in chunks.

A chunked body consists of data and framing: size lines, their extensions, and trailers (RFC 9112, section 7.1). Extensions and trailers are
dropped. Trailers never become headers, because a request is authorised before they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from server.errors import BAD_REQUEST, ApiError

PIECE_BYTES = 8 << 10  # most received bytes that are decoded without a pause
MAX_LINE_BYTES = 4 << 10
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[^\r\n\0]*)?")
TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")


class Body(Protocol):
    """The body of a request, as far as it has arrived."""

    @property
    def is_complete(self) -> bool:
        """Whether `take` has removed the whole body."""
        ...

    def take(self, received: bytearray) -> bytes:
        """Remove at most `PIECE_BYTES` of the body from the beginning of `received`, and return the data in them. Raise ApiError if the
        framing is malformed or too large."""
        ...


def body_of(headers: Sequence[tuple[bytes, bytes]], version: str, max_framing_bytes: int) -> Body:
    """Return the body that the headers declare. If the body is in chunks, its framing may have `max_framing_bytes` bytes. Raise ApiError
    for a transfer encoding other than `chunked`, or for any transfer encoding before HTTP/1.1."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return MeasuredBody(int(next((value for name, value in headers if name == b"content-length"), b"0")))
    if version != "1.1":
        raise ApiError(BAD_REQUEST, f"transfer-encoding is set in HTTP/{version}; expected a content-length, or HTTP/1.1")
    if codings != [b"chunked"]:
        given = b", ".join(codings).decode("latin-1")
        raise ApiError(BAD_REQUEST, f"transfer-encoding is {given!r:.80}; expected chunked alone; compress with content-encoding")
    return ChunkedBody(max_framing_bytes)


class MeasuredBody:
    """A body whose length was declared, or an empty body, for which none was declared."""

    def __init__(self, num_bytes: int) -> None:
        self._num_left = num_bytes

    @property
    def is_complete(self) -> bool:
        return not self._num_left

    def take(self, received: bytearray) -> bytes:
        data = bytes(received[: min(self._num_left, PIECE_BYTES)])
        del received[: len(data)]
        self._num_left -= len(data)
        return data


class ChunkedBody:
    """A body in chunks. Its framing may have `max_framing_bytes` bytes, and one more byte for each byte of data."""

    def __init__(self, max_framing_bytes: int) -> None:
        self.is_complete = False
        self._max_framing_bytes = max_framing_bytes
        self._num_framing_bytes = 0
        self._num_data_bytes = 0
        self._num_left = 0  # bytes that are left of the current chunk
        self._ends_chunk = False  # the next line must be empty, because it ends a chunk
        self._in_trailers = False

    def take(self, received: bytearray) -> bytes:
        piece, at, data = bytes(received[:PIECE_BYTES]), 0, bytearray()
        while at < len(piece) and not self.is_complete:
            if self._num_left:
                part = piece[at : at + self._num_left]
                data += part
                at += len(part)
                self._num_left -= len(part)
                self._num_data_bytes += len(part)
                continue
            end = piece.find(b"\r\n", at, at + MAX_LINE_BYTES)
            if end < 0:
                if len(piece) - at >= MAX_LINE_BYTES:
                    raise ApiError(BAD_REQUEST, f"a chunk size or a trailer is longer than {MAX_LINE_BYTES} bytes; shorten it")
                break
            self._take_line(piece[at:end])
            at = end + 2
        del received[:at]
        return bytes(data)

    def _take_line(self, line: bytes) -> None:
        """Read the line that ends a chunk, a trailer, or the size of the next chunk. Raise ApiError if the line is malformed, or if the
        framing is too large."""
        self._num_framing_bytes += len(line) + 2
        if self._num_framing_bytes > self._max_framing_bytes + self._num_data_bytes:
            raise ApiError(
                BAD_REQUEST,
                f"chunk sizes, chunk extensions and trailers have more than {self._max_framing_bytes} bytes and one per byte of data; "
                "send larger chunks and no trailers",
            )
        if self._ends_chunk:
            if line:
                raise ApiError(BAD_REQUEST, "a chunk is longer than its size; expected a line end after it")
            self._ends_chunk = False
        elif self._in_trailers:
            self.is_complete = not line
            if line and not TRAILER_LINE.fullmatch(line):
                raise ApiError(BAD_REQUEST, f"trailer {line!r:.80} is malformed; expected NAME: VALUE")
        else:
            found = SIZE_LINE.fullmatch(line)
            if found is None:
                raise ApiError(BAD_REQUEST, f"chunk size {line!r:.80} is malformed; expected hexadecimal digits")
            self._num_left = int(found[1], 16)
            self._in_trailers = not self._num_left
            self._ends_chunk = not self._in_trailers
