"""The JSON shapes of the answers of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from server.api.answer.shapes import RankedChatToken


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: Sequence[Any]
    logprobs: Sequence[RankedChatToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    """Thoughts of the model."""

    type: Literal["reasoning"]
    id: str
    summary: Sequence[Any]
    content: Sequence[ReasoningText]
    status: str  # in_progress, completed, or incomplete (the answer ended before the item was complete)


class MessageItem(TypedDict):
    """A message of the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: str  # values as in ReasoningItem
    content: Sequence[OutputText]


class FunctionCallItem(TypedDict):
    """A call of a function that the client runs."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: str  # values as in ReasoningItem


class McpListedTool(TypedDict):
    name: str
    description: str
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None


class McpListItem(TypedDict):
    """The tools that an MCP server offers."""

    type: Literal["mcp_list_tools"]
    id: str
    server_label: str
    tools: Sequence[McpListedTool]
    error: NotRequired[str]  # why the server has not listed its tools


class McpToolFault(TypedDict):
    """The error of a call: the tool has reported it, or this server has refused to make the call or to pass its result on."""

    type: Literal["mcp_tool_execution_error"]
    content: Sequence[Mapping[str, str]]


class McpCallFault(TypedDict):
    """The error of a call without a result: a JSON-RPC error (`mcp_protocol_error`), or there was no JSON-RPC answer (`http_error`)."""

    type: Literal["mcp_protocol_error", "http_error"]
    code: int
    message: str


McpFault = McpToolFault | McpCallFault


class McpCallItem(TypedDict):
    """A call of a tool of an MCP server. This server makes the call."""

    type: Literal["mcp_call"]
    id: str
    server_label: str
    name: str
    arguments: str
    output: str | None  # null until the call has succeeded
    error: McpFault | None  # null unless the call has failed
    status: str  # in_progress, calling, completed, failed, or incomplete (the call was not made, or its end is unknown)
    approval_request_id: str | None  # null: the user did not have to approve the call


class McpApprovalItem(TypedDict):
    """A call that the user must approve before it is made."""

    type: Literal["mcp_approval_request"]
    id: str
    server_label: str
    name: str
    arguments: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | McpListItem | McpCallItem | McpApprovalItem


class CachedInput(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningOutput(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The counts of tokens in a response."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: ReasoningOutput
    total_tokens: int


class ResponseFault(TypedDict):
    """Why a response has failed."""

    code: str
    message: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    completed_at: int | None
    error: ResponseFault | None
    incomplete_details: Incomplete | None
    model: str
    output: Sequence[OutputItem]
    usage: NotRequired[ResponseUsage]  # present once the response has ended
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: NotRequired[str]
    reasoning: Mapping[str, str | None]
    safety_identifier: NotRequired[str]
    service_tier: str
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: NotRequired[str]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(TypedDict):
    """An event of a stream. `type` decides which of the other fields the event has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[Sequence[RankedChatToken]]


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: Sequence[Mapping[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
