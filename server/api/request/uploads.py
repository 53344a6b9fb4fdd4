"""Read the body of an upload as it arrives, within limits on its size and its time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from server.errors import BODY_TOO_LARGE, CLIENT_CLOSED, REQUEST_TIMEOUT, ApiError
from server.http.multipart import MAX_FORM_BYTES, Sink
from server.settings import ServerSettings

SLOWEST = 64 << 10  # bytes that must arrive for each second that an upload takes beyond body_timeout_s


def sized(sink: Sink, settings: ServerSettings, setting: str) -> Sink:
    """Return a sink that passes the bytes of a file on to `sink`. It raises ApiError if the file is larger than the setting named `setting`
    allows."""
    num_bytes = 0

    def take(data: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(data)
        if num_bytes > getattr(settings, setting):
            raise _too_large(settings, setting)
        sink(data)

    return take


def _too_large(settings: ServerSettings, setting: str) -> ApiError:
    """Return the error for a file that is larger than a setting allows."""
    return ApiError(BODY_TOO_LARGE, f"the file is larger than {getattr(settings, setting)} bytes ({setting})")


async def limited(request: Request, settings: ServerSettings, setting: str) -> AsyncIterator[bytes]:
    """Yield the body. `setting`: name of the setting that limits the file in the form; the other parts of the form may have MAX_FORM_BYTES
    together. Raise ApiError if the body is too large or arrives too slowly, or if the client leaves."""
    most, declared = getattr(settings, setting) + MAX_FORM_BYTES, request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(settings, setting)
    began_s, num_bytes, stream = time.monotonic(), 0, request.stream()
    while True:
        late_s = began_s + settings.body_timeout_s + num_bytes / SLOWEST - time.monotonic()
        try:
            with anyio.fail_after(max(0.0, late_s)):
                data = await anext(stream, None)
        except TimeoutError:
            raise ApiError(
                REQUEST_TIMEOUT, f"after {num_bytes} bytes, the file arrives more slowly than {SLOWEST} bytes per second"
            ) from None
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED, "the client closed the connection before it had sent the whole file") from None
        if data is None:
            return
        num_bytes += len(data)
        if num_bytes > most:
            raise _too_large(settings, setting)
        yield data
