"""The interface of transports: how messages reach an MCP server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from server.mcp.attempt import Attempt
from server.mcp.wire import Message, Request

Hear = Callable[[Message], None]  # called with every notification of the server, on any thread


class Transport(Protocol):
    """A connection to an MCP server, or the way to make one for each message."""

    version: str  # the version of MCP that all further requests use
    hear: Hear

    @property
    def keeps_open(self) -> bool:
        """True if the server can send notifications at any time."""
        ...

    def exchange(self, request: Request, attempt: Attempt) -> Mapping[str, Any]:
        """Send a request and return its result. Raise McpError if there is no result. If no answer comes, tell the server that the request
        is cancelled."""
        ...

    def notify(self, message: bytes, attempt: Attempt) -> None:
        """Send a message that has no answer. Raise McpError if the message cannot be sent."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
