"""Split the bytes of a stream into its events: server-sent events, or lines of JSON."""

from __future__ import annotations


class Events:
    """Splits the bytes of a stream into whole events, each with its end."""

    def __init__(self, media_type: str) -> None:
        self._end = b"\n" if "ndjson" in media_type else b"\n\n"
        self._rest = bytearray()  # the beginning of an event that has not ended

    def push(self, data: bytes) -> list[bytes]:
        """Return the events that end in these bytes. An event that has only begun waits for the next call."""
        if not self._rest and data.endswith(self._end) and data.find(self._end) == len(data) - len(self._end):
            return [data]  # one whole event, as servers write them
        num_searched = max(0, len(self._rest) - len(self._end) + 1)
        self._rest += data
        if self._rest.find(self._end, num_searched) < 0:
            return []
        *whole, self._rest = self._rest.split(self._end)
        return [bytes(event + self._end) for event in whole]


def is_comment(event: bytes) -> bool:
    return event.startswith(b":")
