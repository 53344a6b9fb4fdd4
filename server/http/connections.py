"""Limit open connections, so that descriptors are left for restarts of workers, for files, and for probes.

one connection too many -> the one that has been idle longest is closed
all are busy            -> up to RESERVE more are accepted, for probes only: other requests are refused with 503
the server has stopped  -> all that are left are closed
"""

from __future__ import annotations

import asyncio
from typing import Protocol

RESERVE = 8  # connections beyond the limit, for probes
HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/v1/health", "/v2/health/live", "/v2/health/ready", "/ping")
PROBES = frozenset(path.encode() for path in HEALTH_PATHS)


class Connection(Protocol):
    """A connection as this module sees it."""

    def leave(self) -> None:
        """Close the connection when all that was written has been sent."""
        ...

    def give_way(self) -> None:
        """Close the connection at once."""
        ...


class Connections:
    """The connections of one server."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.is_stopping = False  # the server stops: each connection closes after its answer
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # connections without a request, longest idle first
        self._surplus: set[Connection] = set()  # connections beyond the limit, which are kept for probes

    def opened(self, connection: Connection) -> None:
        """Count a new connection. If there are too many, close the one that has been idle longest. If all others are busy, keep the new one
        for probes, as long as at most RESERVE connections are beyond the limit; otherwise close it."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) <= self.most:
            return
        longest_idle = next(iter(self._idle))
        if longest_idle is connection and len(self._open) <= self.most + RESERVE:
            self._surplus.add(connection)
            return
        self.closed(longest_idle)
        longest_idle.give_way()

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._surplus.discard(connection)

    def works(self, connection: Connection) -> None:
        """Mark a connection as busy with a request."""
        self._idle.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        if connection in self._open:
            self._idle[connection] = None

    async def close(self) -> None:
        """Close all connections. Data that their sockets accept at once is still sent."""
        for connection in tuple(self._open):
            connection.leave()
        await asyncio.sleep(0)  # asyncio closes a socket one iteration of the event loop after `leave`
        for connection in tuple(self._open):
            connection.give_way()
        await asyncio.sleep(0)

    def takes(self, connection: Connection, path: bytes) -> bool:
        """Return whether a request for `path` may be answered on this connection. A connection that is kept for probes accepts only probes,
        until there are no longer too many connections."""
        if len(self._open) <= self.most:
            self._surplus.clear()
        return connection not in self._surplus or path in PROBES
