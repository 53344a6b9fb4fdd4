"""Offer the tools of attached MCP servers to a model in a conversation, and call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from server.mcp.attempt import Attempt
from server.mcp.errors import McpError
from server.mcp.names import free_name
from server.mcp.session import Session
from server.mcp.tools import McpTool, ToolResult
from server.text.dialects.calls.characters import object_of

MOST_SHOWN = 1e15  # progress is shown up to this number; a larger one may be too large for a float
LIST_S, CALL_S = 60.0, 600.0  # longest times for a list of tools, and for a call, which the user can cancel


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool of an MCP server that a model may call."""

    session: Session
    tool: McpTool

    @property
    def title(self) -> str:
        return f"{self.session.name}: {self.tool.name}"


class Toolbox:
    """Offers the tools of all attached servers under different names, and calls them. It closes the servers' sessions at the end of a
    `with` block."""

    def __init__(self, sessions: Sequence[Session], warn: Callable[[str], None]) -> None:
        """`sessions`: a session per attached server. `warn` is called with the error of each server whose tools cannot be listed."""
        self._sessions = sessions
        self._warn = warn
        self._offers: dict[str, Offer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for session in self._sessions:
            session.close()

    def offered(self) -> list[dict[str, Any]]:
        """Ask all servers for their tools. Return the tools in the form of a chat request, and let `find` find them. A server that fails
        offers none, and `warn` gets the error."""
        self._offers = {}
        for session in self._sessions:
            try:
                tools = session.tools(Attempt(LIST_S))
            except McpError as error:
                self._warn(str(error))
                continue
            for tool in tools:
                self._offers[free_name(tool.name, session.name, self._offers)] = Offer(session, tool)
        return [_function(name, offer.tool) for name, offer in self._offers.items()]

    def find(self, function: str) -> Offer | None:
        """Return the tool that `offered` last returned under this name of a function, or None if there was none."""
        return self._offers.get(function)

    def call(self, offer: Offer, arguments: str, progress: Callable[[str], None]) -> ToolResult:
        """Call a tool, with `arguments` as the text of a JSON object. A call that fails has an error as its result. `progress` gets the
        messages of progress that the server sends meanwhile, in words."""
        read = object_of(arguments)
        if read is None:
            return ToolResult(f"the arguments are {arguments[:80]!r}; expected a JSON object", is_error=True)
        attempt = Attempt(CALL_S, lambda told: progress(_progress(told)))
        try:
            return offer.session.call(offer.tool, read, attempt)
        except McpError as error:
            return ToolResult(str(error), is_error=True)


def _function(name: str, tool: McpTool) -> dict[str, Any]:
    """Describe a tool as a function of a chat request, whose calls must follow its schema."""
    function = {"name": name, "description": tool.description, "parameters": tool.schema, "strict": True}
    return {"type": "function", "function": function}


def _progress(told: Mapping[str, Any]) -> str:
    """Return a message of progress in words: how much is done, and the server's text. Parts that the message lacks are left out."""
    message, done, total = told.get("message"), told.get("progress"), told.get("total")
    is_shown = all(isinstance(number, int | float) and abs(number) < MOST_SHOWN for number in (done, total))
    share = f"{done:g} of {total:g}" if is_shown else ""
    return ", ".join(part for part in (share, f"{message:.200}" if isinstance(message, str) else "") if part)
