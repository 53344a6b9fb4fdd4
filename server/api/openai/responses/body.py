"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, Tag, model_validator

from server.api.request.fields import FOREIGN, KNOWN, Foreign, Options, foreign_unless, only_type
from server.api.request.schema import (
    AS_TEXT,
    IN_PARTS,
    Alternatives,
    ContentPart,
    Detail,
    Effort,
    FunctionName,
    Int,
    JsonObject,
    JsonObjects,
    JsonSchemaFormat,
    Label,
    SamplingBody,
    Text,
    of_type,
    text_unless,
)

MCP = "of an MCP server"  # tag of the members of unions that name an MCP server
MAX_TOOLS = 256
MAX_ITEMS = 8192  # items of an input; limits the time of validation: all fields are optional, so even wrong items are parsed


class ItemPart(ContentPart):
    """A part of an item's content."""

    annotations: JsonObjects | None = None
    logprobs: JsonObjects | None = None
    detail: Detail | None = None
    file_id: Label | None = None


ItemParts = Annotated[list[ItemPart], Field(max_length=4096, fail_fast=True)]


TextOrParts = Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[ItemParts, Tag(IN_PARTS)], text_unless(list)]


class InputItem(Options):
    """An item: a message, a call, the output of a call, thoughts, or a reference to a stored item. `type` decides which fields the item
    has."""

    type: Label | None = None  # None: a message
    id: Label | None = None
    status: Label | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    phase: Label | None = None  # no effect: stored with the item, but the model does not see it
    content: TextOrParts | None = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: Text | None = None
    output: TextOrParts | None = None
    summary: ItemParts | None = None  # thoughts; the model sees them if `content` has no text
    encrypted_content: Text | None = None  # no effect, like `phase`
    server_label: Label | None = None
    tools: JsonObjects | None = None
    error: Text | JsonObject | None = None
    approval_request_id: Label | None = None  # id of the item that asks the user to approve a call
    approve: bool | None = None  # the user's answer: whether the call may be made
    reason: Text | None = None  # why the user refuses the call

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, value: object) -> object:
        """Turn an item that has only an `id` into a reference. Treat any other value as `only_type` does."""
        item = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        is_reference = item.keys() <= {"id", "type"} and item.get("type") is None and item.get("id")
        return {**item, "type": "item_reference"} if is_reference else only_type(value, ITEM_TYPES)


MCP_TYPES = ("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response")
ITEM_TYPES = (None, "message", "function_call", "function_call_output", "reasoning", "item_reference", *MCP_TYPES)
InputItems = Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ResponseTool(Options):
    """A function that the client runs."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


Names = Annotated[list[Label], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolFilter(Options):
    """A choice of tools of an MCP server: by name, by whether they only read, or by both. A field that is None admits all tools."""

    tool_names: Names | None = None
    read_only: bool | None = None

    def matches(self, name: str, *, is_read_only: bool) -> bool:
        """Return whether a tool is among the chosen ones."""
        return (self.tool_names is None or name in self.tool_names) and (self.read_only is None or self.read_only == is_read_only)


class ApprovalRules(Options):
    """Which calls the user must approve, and which not. If a call matches both filters, or none, the user must approve it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpOffer(Options):
    """The tools of an MCP server. This server calls them, not the client."""

    type: Literal["mcp"]
    server_label: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$", max_length=64)]
    server_url: Label | None = None  # None: the server that the operator's settings call `server_label`
    connector_id: Label | None = None  # refused: only MCP servers are called
    authorization: Text | None = None  # a token for the server, sent as `Authorization: Bearer`
    server_description: Text | None = None
    headers: Annotated[dict[Label, Text], Field(max_length=32)] | None = None
    allowed_tools: Names | ToolFilter | None = None  # None: all tools of the server
    require_approval: Literal["always", "never"] | ApprovalRules | None = None  # None: always
    defer_loading: bool | None = None  # no effect: all tools are offered from the start

    def allows(self, name: str, *, is_read_only: bool) -> bool:
        """Return whether the model may call a tool."""
        match self.allowed_tools:
            case None:
                return True
            case ToolFilter() as allowed:
                return allowed.matches(name, is_read_only=is_read_only)
            case names:
                return name in names

    def needs_approval(self, name: str, *, is_read_only: bool) -> bool:
        """Return whether the user must approve calls of a tool."""
        rules = self.require_approval
        if not isinstance(rules, ApprovalRules):
            return rules != "never"
        if rules.always is not None and rules.always.matches(name, is_read_only=is_read_only):
            return True
        return rules.never is None or not rules.never.matches(name, is_read_only=is_read_only)


AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag(KNOWN)] | Annotated[McpOffer, Tag(MCP)] | Annotated[Foreign, Tag(FOREIGN)],
    foreign_unless("function", further={"mcp": MCP}),
]


class ResponseStreamOptions(Options):
    include_obfuscation: bool | None = None  # no effect: events are never padded


class ToolName(Options):
    """The choice of a function by its name."""

    type: Literal["function"]
    name: Label


class McpChoice(Options):
    """The choice of one tool of an MCP server, or if `name` is None, of all its tools."""

    type: Literal["mcp"]
    server_label: Label
    name: Label | None = None


AnyChosenTool = Annotated[
    Annotated[ToolName, Tag(KNOWN)] | Annotated[McpChoice, Tag(MCP)] | Annotated[Foreign, Tag(FOREIGN)],
    foreign_unless("function", further={"mcp": MCP}),
]


class AllowedToolNames(Options):
    """The tool choice that allows only some tools. `mode` decides whether the model must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AnyChosenTool] = Field(min_length=1, max_length=128, fail_fast=True)


class TextFormat(JsonSchemaFormat):
    """The format of the text: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Options):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect: models have no such setting


class ReasoningOptions(Options):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # no effect: thoughts are returned whole
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # an older name of summary; no effect


class ResponseBody(SamplingBody):
    """The body of /v1/responses."""

    input: Text | InputItems
    model: Label | None = None
    instructions: Text | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Int | None = Field(default=None, ge=1, le=2**31 - 1)
    previous_response_id: Label | None = None
    store: bool | None = None  # None: true
    background: bool | None = None  # true: answer at once with a response in progress, which the client reads later
    tools: Annotated[list[AnyResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolName | McpChoice | AllowedToolNames | None, of_type("function", "mcp", "allowed_tools")
    ] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = Field(default=None, ge=1)  # limit on the number of calls that this server makes to MCP servers
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # optional parts that output items should have; only message.output_text.logprobs has an effect
    include: Annotated[list[Label], Field(max_length=64, fail_fast=True)] | None = None
    top_logprobs: Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: leave out the beginning of a conversation that is too long
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None


class CountedBody(ResponseBody):
    """The body of /v1/responses/input_tokens. The input may be absent if `previous_response_id` names a conversation."""

    input: Text | InputItems = Field(default_factory=list[InputItem])
