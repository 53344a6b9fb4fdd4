"""Offer the tools of MCP servers as functions that the model may call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from server.api.openai.responses.body import McpOffer
from server.api.request.schema import FunctionDefinition, Tool
from server.mcp.names import free_name, plain_name
from server.mcp.tools import InvalidTool, McpTool, tool_of


@dataclass(frozen=True, slots=True)
class McpFunction:
    """A tool of an MCP server, offered to the model as a function."""

    name: str  # name by which the model calls the tool
    offer: McpOffer
    tool: McpTool

    @property
    def label(self) -> str:
        """The label of the server."""
        return self.offer.server_label

    @property
    def needs_approval(self) -> bool:
        """Whether the user must approve a call."""
        return self.offer.needs_approval(self.tool.name, is_read_only=self.tool.is_read_only)

    @property
    def offered(self) -> Tool:
        """The tool as a chat request offers it."""
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.tool.description or None, parameters=dict(self.tool.schema), strict=True
        )
        return Tool(type="function", function=function)


def functions_from(listed: Sequence[tuple[McpOffer, Sequence[McpTool]]], taken: Collection[str]) -> list[McpFunction]:
    """Return a function for each tool that the request allows, of all servers. `taken`: the names of the client's functions. A function has
    the name of its tool, with `_` for characters that APIs refuse, unless another function has this name: see `free_name`."""
    found: dict[str, McpFunction] = {}
    for offer, tools in listed:
        for tool in tools:
            if offer.allows(tool.name, is_read_only=tool.is_read_only):
                name = free_name(tool.name, offer.server_label, {*taken, *found})
                found[name] = McpFunction(name, offer, tool)
    return list(found.values())


def function_name(functions: Sequence[McpFunction], label: str, tool: str) -> str:
    """Return the name of the function for a tool that an earlier turn has called. `label` is that of the tool's server. If the tool is no
    longer offered, return its own name, with `_` for characters that APIs refuse."""
    return next((one.name for one in functions if (one.label, one.tool.name) == (label, tool)), plain_name(tool))


def read_listed(tools: Sequence[Mapping[str, object]] | None) -> list[McpTool]:
    """Return the tools of an item `mcp_list_tools`. Entries that are no tools are left out."""
    found: list[McpTool] = []
    for entry in tools or ():
        match entry:
            case {"name": str(name), "input_schema": dict(schema)}:
                text, annotations = entry.get("description"), entry.get("annotations")
                described = {"name": name, "description": text, "inputSchema": schema, "annotations": annotations}
                try:
                    found.append(tool_of(described))
                except InvalidTool:
                    continue
            case _:
                continue
    return found
