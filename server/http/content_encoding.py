"""Decode a compressed body while it arrives, in pieces of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from server.errors import INVALID_JSON, UNSUPPORTED_ENCODING, ApiError
from server.http.json_scan import PIECE_BYTES

PLAIN = ("", "identity")


def decoder(encoding: str) -> Callable[[bytes, bool], Iterator[bytes]]:
    """Return a function that takes received bytes, and whether they are the last ones, and yields the decoded bytes in pieces of bounded
    size. So the caller can apply the same limits to a compressed body as to a plain one. A compressed body must end with its checksum, and
    nothing may follow. `decoder` raises ApiError if the encoding is unknown, and the function that it returns raises ApiError if the body
    is damaged."""
    encoding = encoding.strip().lower()
    if encoding in PLAIN:
        return lambda data, _is_last: (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(UNSUPPORTED_ENCODING, f"content-encoding is {encoding!r:.40}; expected gzip, deflate or none")
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects gzip and zlib by their headers

    def decode(data: bytes, is_last: bool) -> Iterator[bytes]:
        try:
            while data and not unpack.eof:
                yield unpack.decompress(data, PIECE_BYTES)
                data = unpack.unconsumed_tail
            if is_last:
                yield unpack.flush()
        except zlib.error as error:
            raise ApiError(INVALID_JSON, f"content-encoding is {encoding}, but the body cannot be decoded: {error}") from error
        if data or unpack.unused_data:
            raise ApiError(INVALID_JSON, f"content-encoding is {encoding}, but bytes follow the end of the compressed body")
        if is_last and not unpack.eof:
            raise ApiError(INVALID_JSON, f"content-encoding is {encoding}, but the body ends before its checksum; send all of it")

    return decode
