"""Read server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from server.mcp.errors import McpLost
from server.mcp.wire import MAX_MESSAGE_BYTES


@dataclass(slots=True)
class EventReader:
    """Splits bytes into events. `last_id` and `retry_ms`, which the server sends, say where and when an interrupted stream continues."""

    name: str
    last_id: str = ""
    retry_ms: int = 1000
    _rest: bytearray = field(default_factory=bytearray)  # the incomplete last line
    _data: bytearray = field(default_factory=bytearray)  # data of the incomplete last event

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ends in this piece. Raise McpLost if an event is too large."""
        searched = len(self._rest)
        self._rest += piece
        while (end := self._rest.find(b"\n", searched)) >= 0:
            line = bytes(self._rest[:end]).removesuffix(b"\r")
            del self._rest[: end + 1]
            searched = 0
            if line:
                self._take(line)
            elif self._data.strip():
                data, self._data = bytes(self._data), bytearray()
                yield data
        if len(self._rest) + len(self._data) > MAX_MESSAGE_BYTES:
            raise McpLost(f"MCP server {self.name!r} sent an event of more than {MAX_MESSAGE_BYTES >> 20} MiB")

    def _take(self, line: bytes) -> None:
        """Read a line of an event. Ignore unknown fields, and ids and times of an unusual form."""
        kind, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if kind == b"data":
            self._data += value + b"\n"
        elif kind == b"id" and len(value) < 512 and value.isascii():
            self.last_id = value.decode()
        elif kind == b"retry" and value.isdigit() and len(value) < 8:
            self.retry_ms = int(value)
