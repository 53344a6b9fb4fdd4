"""Convert a request of Anthropic's API to a chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from server.api.anthropic.body import BLOCK_TYPES, AnthropicMessage, AnthropicTool, ContentBlock, MessagesBody, PromptBody
from server.api.request.prepare import invalid
from server.api.request.schema import (
    CalledFunction,
    ChatBody,
    ContentPart,
    FunctionDefinition,
    GivenImage,
    GivenMessage,
    JsonSchemaFormat,
    Message,
    MessageCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    joined,
)
from server.errors import UNSUPPORTED_CONTENT, ApiError
from server.text.dialects.dialect import Dialect

BILLING = re.compile(r"(x-anthropic-billing-header:[^\n]{0,400}?\bcch=)[0-9A-Za-z]+")
BLOCK = re.compile(r"(messages\[\d+\]\.content\[\d+\])(\.content\[\d+\])?")


def without_hash(text: str) -> str:
    """Return instructions with a constant in place of the hash that Claude Code puts into their first line. The hash is new in each
    request, so the prefix cache would find no tokens after the hash."""
    found = BILLING.match(text)
    return text if found is None else f"{found[1]}0{text[found.end() :]}"


def chat_of(body: PromptBody, dialect: Dialect, *, keeps_hash: bool = False) -> ChatBody:
    """Return the conversation as a ChatBody. Every value of `body` has been validated. The chat request allows as many tokens as fit into
    the context, so that the caller learns this number; the caller then lowers the limit to `max_tokens`. `keeps_hash`: leave the hash of
    Claude Code in the instructions. Raise ApiError for a block that is not supported, or lacks a field."""
    system = _text(body.system, "system")
    given = system if keeps_hash else without_hash(system)
    messages: list[Message] = [] if body.system is None else [GivenMessage(role="system", content=given, place="system")]
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    choice, output = body.tool_choice, body.output_config
    budget = body.thinking.budget_tokens if body.thinking is not None and dialect.thought_bounds is not None else None
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        sampling = {name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_k", "seed")}
        sampling["stop"] = body.stop_sequences
        sampling["max_tokens"] = -1
    variables = {} if output is None or output.effort is None else {"reasoning_effort": output.effort}
    return ChatBody.model_construct(
        **sampling,
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        tools=[_tool(tool) for tool in body.tools or () if isinstance(tool, AnthropicTool)] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(body),
        enable_thinking=body.thinking is not None and body.thinking.type in ("enabled", "adaptive"),
        thinking_token_budget=budget,
        chat_template_kwargs=variables,
    )


def _messages(message: AnthropicMessage, where: str) -> list[Message]:
    """Convert one message, whose path in the request is `where`. Each tool result becomes a message of its own. The other blocks become one
    message after these, with thoughts and calls in fields. Encrypted thoughts are left out. Raise ApiError for a block of unknown type, or
    a block that lacks a field."""
    if isinstance(message.content, str):
        return [GivenMessage(role=message.role, content=message.content, place=where)]
    made: list[Message] = []
    parts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[MessageCall] = []
    for index, block in enumerate(message.content):
        at = f"{where}.content[{index}]"
        match block.type:
            case "text":
                parts.append(ContentPart(type="text", text=_required(block.text, f"{at}.text")))
            case "image":
                parts.append(_image(block, at))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # ignored: another server encrypted these thoughts
            case "tool_use":
                function = CalledFunction(name=_required(block.name, f"{at}.name"), arguments=block.input or {})
                calls.append(MessageCall(id=_required(block.id, f"{at}.id"), type="function", function=function))
            case "tool_result":
                result = _result(block.content, f"{at}.content", is_error=bool(block.is_error))
                call_id = _required(block.tool_use_id, f"{at}.tool_use_id")
                made.append(GivenMessage(role="tool", content=result, tool_call_id=call_id, place=at))
            case _:
                raise _not_understood(block, at)
    if parts or thoughts or calls or not made:
        said = GivenMessage(role=message.role, content=joined(parts), reasoning_content="".join(thoughts) or None, place=where)
        said.tool_calls = calls or None
        made.append(said)
    return made


def _image(block: ContentBlock, where: str) -> GivenImage:
    """Return the part for an image. Raise ApiError if its source is missing or of an unknown type."""
    source = block.source
    if source is None or source.type not in ("base64", "url"):
        found = None if source is None else source.type
        raise invalid(f"{where}.source", f"{with_type(where, 'image')}.source has type {found!r:.40}; expected base64 or url")
    if source.type == "url":
        return GivenImage(image_url=_required(source.url, f"{where}.source.url"), place=f"{where}.source.url")
    data = _required(source.data, f"{where}.source.data")
    return GivenImage(image_url=f"data:{source.media_type or 'image'};base64,{data}", place=f"{where}.source.data")


def _result(content: str | Sequence[ContentBlock] | None, where: str, *, is_error: bool) -> str | list[ContentPart]:
    """Return the content of a tool result: its texts on separate lines or, if it has images, a list of parts. "Error: " precedes the
    content of an error."""
    error = "Error: " if is_error else ""
    if content is None or isinstance(content, str) or all(block.type != "image" for block in content):
        return error + _text(content, where)
    parts: list[ContentPart] = [ContentPart(type="text", text=error)] if error else []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        parts.append(_image(block, at) if block.type == "image" else ContentPart(type="text", text=_text([block], where, index) + "\n"))
    return parts


def _text(content: str | Sequence[ContentBlock] | None, where: str, first: int = 0) -> str:
    """Return the text of instructions or of a tool result, its blocks on separate lines. `first`: index of the first block. Raise ApiError
    for blocks other than text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content, first):
        if block.type != "text":
            raise _not_understood(block, f"{where}[{index}]")
    return "\n".join(_required(block.text, f"{where}[{index}].text") for index, block in enumerate(content, first))


def _not_understood(block: ContentBlock, where: str) -> ApiError:
    """Return the error for a block of an unknown type."""
    named = with_type(where, block.type) if block.type == "document" else where
    message = f"{named} has type {block.type!r:.40}, which is not supported here; known types are {', '.join(BLOCK_TYPES)}"
    return ApiError(UNSUPPORTED_CONTENT, message, param=f"{where}.type")


def with_type(path: str, kind: str) -> str:
    """Return the path of a block of a message, or of a field below it, as Anthropic's errors write it: the type `kind` of the block follows
    the block's index. By such a path, Claude Code finds an image or a document, and repeats the request without it."""
    found = BLOCK.match(path)
    if found is None:
        return path
    outer, inner = found.groups()
    block = outer if inner is None else f"{outer}.tool_result{inner}"
    return f"{block}.{kind}{path[found.end() :]}"


def _required(value: str | None, param: str) -> str:
    """Return a value. Raise ApiError if the value is absent."""
    if value is None:
        raise invalid(param, f"{param} is absent and required")
    return value


def _tool(tool: AnthropicTool) -> Tool:
    """Convert a tool."""
    function = FunctionDefinition.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool.model_construct(type="function", function=function)


def _tool_choice(body: PromptBody) -> object:
    """Convert the tool choice. Return None if the request has no tool choice. Raise ApiError if the type is `tool` and the name is
    absent."""
    choice = body.tool_choice
    match choice.type if choice is not None else None:
        case "any":
            return "required"
        case "tool":
            name = _required(choice.name if choice is not None else None, "tool_choice.name")
            return NamedTool(type="function", function=NamedFunction(name=name))
        case kind:
            return kind


def _format(body: PromptBody) -> ResponseFormat | None:
    """Return the response format, or None if the answer may be any text. Raise ApiError if the request has both fields for a format."""
    named = body.output_config.format if body.output_config is not None else None
    if named is not None and body.output_format is not None:
        raise invalid("output_format", "output_format and output_config.format are given; use output_config.format, the later name")
    form = named or body.output_format
    if form is None:
        return None
    return ResponseFormat.model_construct(type="json_schema", json_schema=JsonSchemaFormat.model_construct(schema_=form.schema_))
