"""A conversation with one MCP server: agree on the version, list the tools, call them.

Servers of version 2026-07-28 and later read the version from each request. Servers of earlier versions begin with a handshake. The answer
to the first request shows to which of these two kinds a server belongs. After a connection has failed, the next call opens a new one, so
only one call fails if a server dies.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from server.mcp.attempt import Attempt
from server.mcp.errors import McpLost, McpRefused, McpStatus, McpStopped
from server.mcp.tools import InvalidTool, McpTool, ToolResult, result_of_call, tool_of
from server.mcp.transport import Hear, Transport
from server.mcp.wire import LEGACY, MODERN, Message, Request, notification

META = "io.modelcontextprotocol/"  # begins the keys of the metadata of a request
UNSUPPORTED_VERSION, HEADER_MISMATCH, MISSING_CAPABILITY = -32022, -32020, -32021
MODERN_ERRORS = (UNSUPPORTED_VERSION, HEADER_MISMATCH, MISSING_CAPABILITY)  # sent only by servers of the newest version
PROBE_S = 5.0  # time to answer the first request, which servers of earlier versions may ignore
MAX_TOOLS, MAX_PAGES = 256, 64
MOST_FRESH_MS = 86_400_000  # longest time for which a list of tools is kept over HTTP
TOOLS_CHANGED = "notifications/tools/list_changed"
log = logging.getLogger(__name__)

Connect = Callable[[Hear], Transport]


class Session:
    """A conversation with one MCP server. Calls from several threads are made one after the other."""

    def __init__(self, name: str, connect: Connect) -> None:
        """`connect` makes a transport to the server."""
        self.name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._transport: Transport | None = None
        self._is_legacy: bool | None = None  # whether the server is of an earlier version; None: not known yet
        self._announces_changes = False  # whether a server of the newest version can tell that its tools have changed
        self._is_silent = False  # the server has not answered the first request: it ignores this request, or starts slowly
        self._tools: dict[str, McpTool] | None = None  # the tools by name, as listed last; None: not listed yet
        self._fresh_until_s = 0.0  # time of the monotonic clock until which `_tools` need not be listed again
        self._progress: Callable[[Mapping[str, Any]], None] | None = None  # gets the progress of the present request

    def tools(self, attempt: Attempt) -> list[McpTool]:
        """Return the server's tools. Ask for the list again if the server has said that the tools have changed, if the connection was
        closed, or, over HTTP, if the time is over for which the server allows a list to be kept. Raise McpError if the server does not list
        its tools."""
        with self._lock:
            return list(self._listed(attempt).values())

    def call(self, tool: McpTool, arguments: Mapping[str, Any], attempt: Attempt) -> ToolResult:
        """Call a tool. Raise McpError if the call fails; an error that the tool reports is a result."""
        with self._lock:
            params = {"name": tool.name, "arguments": arguments}
            return result_of_call(self._ask("tools/call", params, attempt, tool.headers_of(arguments)))

    def close(self) -> None:
        """End the connection. The next call opens another connection."""
        with self._lock:
            self._drop()

    # --- tools -----------------------------------------------------------------------------------------------------------

    def _listed(self, attempt: Attempt) -> dict[str, McpTool]:
        """Return the tools by name. List them again if they may have changed. Raise McpError if the server does not list them, or lists too
        many."""
        if self._tools is not None and time.monotonic() < self._fresh_until_s:
            return self._tools
        self._opened(attempt)
        self._tools = None  # if listing fails, no old list remains
        self._fresh_until_s = float("inf")  # a notification that comes meanwhile lowers this time
        found: dict[str, McpTool] = {}
        cursor: str | None = None
        fresh_s = float("inf")
        for _ in range(MAX_PAGES):
            page = self._ask("tools/list", {} if cursor is None else {"cursor": cursor}, attempt)
            self._take_page(page, found)
            fresh_s = min(fresh_s, _seconds(page.get("ttlMs")))
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str):
                break
        else:
            raise McpLost(f"MCP server {self.name!r} has more than {MAX_PAGES} pages of tools")
        self._tools = found
        if self._transport is None or not self._transport.keeps_open:  # such servers cannot tell that their tools have changed
            self._fresh_until_s = time.monotonic() + fresh_s if fresh_s < float("inf") else 0.0
        return found

    def _take_page(self, page: Message, found: dict[str, McpTool]) -> None:
        """Add the tools of a page to `found`, except those that are not valid. Raise McpLost if the page has no list, or if there are too
        many tools."""
        entries = page.get("tools")
        if not isinstance(entries, list):
            raise McpLost(f"MCP server {self.name!r} sent a list of tools without tools")
        for entry in cast("list[object]", entries):
            try:
                tool = tool_of(entry)
            except InvalidTool as error:
                log.warning("a tool of MCP server %r is left out: %s", self.name, error)
                continue
            found[tool.name] = tool
            if len(found) > MAX_TOOLS:
                raise McpLost(f"MCP server {self.name!r} has more than {MAX_TOOLS} tools")

    def _hear(self, message: Message) -> None:
        """Take note of a notification of the server that its tools have changed, or of progress. Ignore other notifications."""
        params = message.get("params")
        if message["method"] == TOOLS_CHANGED:
            self._fresh_until_s = 0.0
        elif message["method"] == "notifications/progress" and self._progress is not None and isinstance(params, dict):
            self._progress(cast("Message", params))

    # --- requests --------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, params: Mapping[str, Any], attempt: Attempt, headers: Mapping[str, str] | None = None) -> Message:
        """Send a request and return its result. `headers` are HTTP headers of this request only. If a server of an earlier version has
        forgotten the session, begin another session and send the request again. Raise McpError if there is no result."""
        transport = self._opened(attempt)
        try:
            return self._send(transport, method, params, attempt, headers)
        except McpStatus as error:
            if error.status != 404 or not self._is_legacy:
                raise
        self._drop()  # the server has forgotten the session
        return self._send(self._opened(attempt), method, params, attempt, headers)

    def _send(
        self, transport: Transport, method: str, params: Mapping[str, Any], attempt: Attempt, headers: Mapping[str, str] | None = None
    ) -> Message:
        """Send a request over a transport, and return its result. Raise McpError if there is no result. On McpLost, close the connection,
        so that the next request opens another one."""
        request = self._request(method, params, attempt, headers or {})
        self._progress = attempt.progress
        try:
            return transport.exchange(request, attempt)
        except McpLost:
            self._drop()
            raise
        finally:
            self._progress = None

    def _request(self, method: str, params: Mapping[str, Any], attempt: Attempt, headers: Mapping[str, str]) -> Request:
        """Return a request with a new id, and with the metadata that the server's version needs. The request asks for notifications of
        progress if the attempt has a `progress`."""
        number = next(self._ids)
        meta: dict[str, Any] = {} if attempt.progress is None else {"progressToken": number}
        if not self._is_legacy:
            meta |= {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": {}, f"{META}clientInfo": client_info()}
        return Request(number, method, {**params, **({"_meta": meta} if meta else {})}, headers)

    # --- the beginning ---------------------------------------------------------------------------------------------------

    def _opened(self, attempt: Attempt) -> Transport:
        """Return the open transport. If there is none, connect, and agree on the version. Raise McpError if connecting or agreeing
        fails."""
        if self._transport is None:
            try:
                self._open(attempt)
            except BaseException:  # an interrupt, too, leaves a server that waits for the rest of the handshake
                self._is_legacy, self._is_silent = None, False
                self._drop()
                raise
        assert self._transport is not None
        return self._transport

    def _open(self, attempt: Attempt) -> None:
        """Connect, and agree on the version. Raise McpError if connecting or agreeing fails."""
        if self._is_legacy is None:
            self._is_legacy = self._find_era(attempt)
        if self._is_legacy:
            self._shake_hands(attempt)
        if not self._is_legacy:
            self._transport = self._transport or self._connect(self._hear)
            if self._announces_changes:
                self._listen(self._transport)

    @property
    def _is_connected(self) -> bool:
        """Whether there is a transport."""
        return self._transport is not None

    def _find_era(self, attempt: Attempt) -> bool:
        """Connect, send a request that only servers of the newest version know, and return whether the server is of an earlier version. A
        server of an earlier version refuses the request or answers with a bad HTTP status. A process also counts as a server of an earlier
        version if it ends or does not answer within PROBE_S. Raise McpError if client and server have no version in common, if the server
        needs authorization or redirects, or if it cannot be reached or does not answer."""
        transport = self._transport = self._connect(self._hear)
        try:
            self._discover(transport, attempt.within(PROBE_S) if transport.keeps_open else attempt)
        except McpRefused as error:
            if error.code not in MODERN_ERRORS:
                return True
            raise
        except McpStatus as error:
            if error.status in (401, 403) or 300 <= error.status < 400:
                raise
            return True
        except McpStopped:
            if transport.keeps_open and not attempt.has_ended:
                self._is_silent = True
                return True
            raise
        except McpLost:
            if transport.keeps_open and not self._is_connected:  # the first request may have ended the process
                return True
            raise
        return False

    def _discover(self, transport: Transport, attempt: Attempt) -> None:
        """Send `server/discover`, which only servers of the newest version know, and note whether the server announces changes of its
        tools. Raise McpRefused if the server does not support the version MODERN, and another McpError if there is no result."""
        found = self._send(transport, "server/discover", {}, attempt)
        versions = found.get("supportedVersions")
        if not isinstance(versions, list) or MODERN not in versions:
            raise McpRefused(f"MCP server {self.name!r} speaks the versions {versions!r:.200}; expected {MODERN}", UNSUPPORTED_VERSION)
        self._announces_changes = transport.keeps_open and _announces_changes(found)

    def _listen(self, transport: Transport) -> None:
        """Ask for notifications of changed tools. The notifications arrive until the connection ends; the request itself has no answer.
        Raise McpError if the request cannot be sent."""
        request = self._request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, Attempt(PROBE_S), {})
        transport.notify(request.encode(), Attempt(PROBE_S))

    def _shake_hands(self, attempt: Attempt) -> None:
        """Agree on a version with a server of an earlier version. If the server did not answer the first request and refuses the handshake,
        assume that it is a server of the newest version that started slowly. Raise McpError if no version is agreed on."""
        transport = self._transport = self._transport or self._connect(self._hear)
        transport.version = LEGACY[0]
        params = {"protocolVersion": LEGACY[0], "capabilities": {}, "clientInfo": client_info()}
        try:
            agreed = self._send(transport, "initialize", params, attempt).get("protocolVersion")
            if agreed not in LEGACY:
                raise McpLost(f"MCP server {self.name!r} speaks version {agreed!r:.40}; expected one of {', '.join((MODERN, *LEGACY))}")
            transport.version = agreed
            transport.notify(notification("notifications/initialized"), attempt)
        except McpRefused:
            if not self._is_silent:
                raise
            self._is_silent = self._is_legacy = False  # a server of the newest version, which started slowly, has no handshake
            transport.version = MODERN
            self._discover(transport, attempt)

    def _drop(self) -> None:
        """Close the transport, if there is one. The tools are listed again when they are needed next."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            self._fresh_until_s = 0.0


def client_info() -> dict[str, str]:
    """Return the name and the version of this client."""
    try:
        return {"name": "relaxserve", "version": version("relaxserve")}
    except PackageNotFoundError:
        return {"name": "relaxserve", "version": "0"}


def _announces_changes(found: Message) -> bool:
    """Return whether a server says that it tells when its tools have changed."""
    capabilities = found.get("capabilities")
    tools = cast("Message", capabilities).get("tools") if isinstance(capabilities, dict) else None
    return isinstance(tools, dict) and cast("Message", tools).get("listChanged") is True


def _seconds(milliseconds: object) -> float:
    """Return for how many seconds a list may be kept: 0 if the server names no time, because it may then change the list at any time."""
    return min(max(0, milliseconds), MOST_FRESH_MS) / 1000 if isinstance(milliseconds, int | float) else 0.0
