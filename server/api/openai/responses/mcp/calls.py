"""Check the MCP servers that one response uses, list their tools, and call them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.api.openai.responses.body import InputItem, McpOffer, ResponseBody, ResponseTool
from server.api.openai.responses.mcp.functions import McpFunction, functions_from, read_listed
from server.api.openai.responses.mcp.items import call_fault, tool_fault
from server.api.openai.responses.shapes import McpFault
from server.api.request.prepare import invalid
from server.errors import UNSUPPORTED_FIELD, ApiError
from server.mcp.errors import McpError
from server.mcp.http import header_fault
from server.mcp.servers import Entry, McpServers
from server.mcp.session import Session
from server.mcp.tools import McpTool
from server.text.dialects.calls.characters import object_of

MAX_RESULT_CHARS = 1 << 18
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Used:
    """An MCP server that a response uses: its entry in the request (`offer`), its entry in the operator's settings, and the session."""

    offer: McpOffer
    entry: Entry
    session: Session


class McpCalls:
    """The MCP servers of one response, by their labels."""

    def __init__(self, body: ResponseBody, servers: McpServers) -> None:
        """Raise ApiError if the request names an MCP server that the operator does not allow, gives two servers the same label, names a
        connector, or has headers that cannot be sent."""
        self._servers = servers
        self._taken = [tool.name for tool in body.tools or () if isinstance(tool, ResponseTool)]
        self._used: dict[str, Used] = {}
        for index, tool in enumerate(body.tools or ()):
            if isinstance(tool, McpOffer):
                if tool.server_label in self._used:
                    raise invalid(f"tools[{index}].server_label", f"two MCP servers have the label {tool.server_label!r}")
                self._used[tool.server_label] = self._use(tool, f"tools[{index}]")

    @property
    def offers(self) -> list[McpOffer]:
        """The offer of each server, as the request states it."""
        return [used.offer for used in self._used.values()]

    def functions(self, listed: Mapping[str, Sequence[McpTool]]) -> list[McpFunction]:
        """Return the functions that the model may call. `listed` has the tools of each server, by the server's label."""
        return functions_from([(used.offer, listed.get(label, ())) for label, used in self._used.items()], self._taken)

    async def tools(self, label: str) -> list[McpTool]:
        """Return the tools of a server. Raise McpError if the server does not list them."""
        used = self._used[label]
        return await self._servers.run(used.entry, used.session.tools)

    async def call(self, function: McpFunction, arguments: str) -> str | McpFault:
        """Call a tool. Return its output, or an error if the call or the tool fails, if the arguments are no JSON object, or if the result
        is too long."""
        used = self._used[function.label]
        read = object_of(arguments)
        if read is None:
            return tool_fault(f"the arguments are {arguments[:80]!r}; expected a JSON object")
        began_s = time.monotonic()
        try:
            result = await self._servers.run(used.entry, lambda attempt: used.session.call(function.tool, read, attempt))
        except McpError as error:
            return call_fault(error)
        log.info("MCP server %r: %s took %.3f s", used.entry.name, function.tool.name, time.monotonic() - began_s)
        if len(result.text) > MAX_RESULT_CHARS:
            return tool_fault(f"the result has {len(result.text)} characters; expected at most {MAX_RESULT_CHARS}")
        return tool_fault(result.text) if result.is_error else result.text

    def close(self) -> None:
        """End the sessions, without waiting until they have ended."""
        for used in self._used.values():
            self._servers.close(used.session)

    def _use(self, offer: McpOffer, where: str) -> Used:
        """Return the server of an offer, with the operator's settings for it and a session that connects when it is first used. Raise
        ApiError if the server may not be called. `where` is the path of the offer in the request."""
        if offer.connector_id is not None:
            raise ApiError(UNSUPPORTED_FIELD, f"{where}.connector_id is not supported: only MCP servers are called", param=where)
        if not self._servers.names:
            message = f"{where} is an MCP server, and this server calls none; its operator can allow some by mcp_servers"
            raise ApiError(UNSUPPORTED_FIELD, message, param=where)
        entry = self._servers.find(offer.server_label, offer.server_url)
        if entry is None:
            field = "server_label" if offer.server_url is None else "server_url"
            allowed = ", ".join(self._servers.names)
            message = f"{where}.{field} names no MCP server that this server may call; allowed are, by server_label: {allowed}"
            raise invalid(f"{where}.{field}", message)
        return Used(offer, entry, self._servers.session(offer.server_label, entry, _headers(offer, where)))


def listed_before(items: Sequence[InputItem]) -> dict[str, list[McpTool]]:
    """Return the tools that earlier responses of the conversation have listed, by the label of their server. Lists with an error are left
    out, and of several lists of a server the last one counts."""
    return {
        item.server_label: read_listed(item.tools)
        for item in items
        if item.type == "mcp_list_tools" and item.server_label is not None and item.error is None
    }


def _headers(offer: McpOffer, where: str) -> dict[str, str]:
    """Return the headers for requests to a server: the offer's headers, and its credentials. Raise ApiError if a header cannot be sent."""
    headers = dict(offer.headers or {})
    if offer.authorization is not None:
        headers["authorization"] = f"Bearer {offer.authorization}"
    if fault := header_fault(headers):
        raise invalid(f"{where}.headers", f"{where}.headers {fault}")
    return headers
