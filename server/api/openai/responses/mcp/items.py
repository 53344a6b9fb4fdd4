"""Build the items of a response that are about MCP servers: lists of tools, calls, and requests for approval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.api.answer.blocks import Block
from server.api.openai.responses.body import InputItem
from server.api.openai.responses.mcp.functions import McpFunction
from server.api.openai.responses.shapes import (
    McpApprovalItem,
    McpCallFault,
    McpCallItem,
    McpFault,
    McpListedTool,
    McpListItem,
    McpToolFault,
    OutputItem,
)
from server.mcp.errors import McpError, McpRefused, McpStatus, McpStopped
from server.mcp.tools import McpTool


@dataclass(slots=True)
class ToolList:
    """The tools of a server, or the reason why they could not be listed."""

    label: str
    tools: Sequence[McpTool] = field(default_factory=list[McpTool])
    error: str | None = None

    def item(self, block: Block, *, is_open: bool) -> OutputItem:
        """Return the output item. `is_open`: without the tools, as when the item is added."""
        listed: McpListItem = {"type": "mcp_list_tools", "id": block.id, "server_label": self.label, "tools": []}
        if not is_open:
            listed["tools"] = [_listed(tool) for tool in self.tools]
        if self.error is not None:
            listed["error"] = self.error
        return listed


@dataclass(slots=True)
class McpCall:
    """A call of a tool that this server makes."""

    label: str
    tool_name: str
    function: McpFunction | None  # None: the request does not offer the tool
    approval_id: str | None = None  # id of the item that asked the user to approve the call; None: the user need not approve the call
    output: str | None = None  # None: the call has not succeeded
    error: McpFault | None = None  # None: the call has not failed
    status: str = "in_progress"

    def end(self, outcome: str | McpFault) -> None:
        """End the call with its output, or with an error."""
        if isinstance(outcome, str):
            self.status, self.output = "completed", outcome
        else:
            self.status, self.error = "failed", outcome

    def item(self, block: Block, *, is_open: bool) -> OutputItem:
        """Return the output item. `is_open`: without the arguments, as when the item is added."""
        made: McpCallItem = {
            "type": "mcp_call",
            "id": block.id,
            "server_label": self.label,
            "name": self.tool_name,
            "arguments": "" if is_open else block.text,
            "output": self.output,
            "error": self.error,
            "status": self.status,
            "approval_request_id": self.approval_id,
        }
        return made


@dataclass(slots=True)
class ApprovalRequest:
    """A call that the user must approve before it is made."""

    function: McpFunction

    def item(self, block: Block, *, is_open: bool) -> OutputItem:
        """Return the output item. `is_open`: without the arguments."""
        asked: McpApprovalItem = {
            "type": "mcp_approval_request",
            "id": block.id,
            "server_label": self.function.label,
            "name": self.function.tool.name,
            "arguments": "" if is_open else block.text,
        }
        return asked


McpItem = ToolList | McpCall | ApprovalRequest


def _listed(tool: McpTool) -> McpListedTool:
    """Return a tool as an item `mcp_list_tools` lists it."""
    return {"name": tool.name, "description": tool.description, "input_schema": tool.schema, "annotations": tool.annotations}


def tool_fault(text: str) -> McpToolFault:
    """Return the error of a call. `text` is the error that the tool has reported, or this server's reason for refusing the call or its
    result."""
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def call_fault(error: McpError) -> McpCallFault:
    """Return the error of a call without a result. If the MCP server has answered neither with a JSON-RPC error nor with an HTTP error
    status, `code` is the HTTP status with which a gateway would answer."""
    if isinstance(error, McpRefused):
        return {"type": "mcp_protocol_error", "code": error.code, "message": str(error)}
    code = error.status if isinstance(error, McpStatus) else 504 if isinstance(error, McpStopped) else 502
    return {"type": "http_error", "code": code, "message": str(error)}


def approved(items: Sequence[InputItem]) -> list[InputItem]:
    """Return the requests for approval that the user has approved and whose calls were not made yet, in the order of the user's answers."""
    requests: Mapping[str | None, InputItem] = {item.id: item for item in items if item.type == "mcp_approval_request"}
    made = {item.approval_request_id for item in items if item.type == "mcp_call"}
    answered = [item.approval_request_id for item in items if item.type == "mcp_approval_response" and item.approve]
    return [requests[asked] for asked in dict.fromkeys(answered) if asked in requests and asked not in made]
