"""Split the bytes of a stream into its events: server-sent events, or lines of JSON."""

from __future__ import annotations


class Events:
    """Splits the bytes of a stream into whole events, each with its end."""

    def __init__(self, media_type: str) -> None:
        self._end = b"\n" if "ndjson" in media_type else b"\n\n"
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        if not self._rest and data.endswith(self._end) and data.find(self._end) == len(data) - len(self._end):
            return [data]  # one whole event, as servers write them
        *whole, self._rest = (self._rest + data).split(self._end)
        return [event + self._end for event in whole]


def is_comment(event: bytes) -> bool:
    return event.startswith(b":")
