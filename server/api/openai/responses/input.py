"""Convert a request of /v1/responses to a chat request: input items become messages, other fields become fields of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from server.api.openai.responses.body import (
    ITEM_TYPES,
    MAX_ITEMS,
    MCP_TYPES,
    AllowedToolNames,
    InputItem,
    ItemPart,
    McpChoice,
    ResponseBody,
    ResponseTool,
    ToolName,
)
from server.api.openai.responses.mcp.functions import McpFunction, function_name
from server.api.openai.responses.store import Item, Items, ResponseStore
from server.api.request.conversation import part_text, text_of
from server.api.request.fields import Foreign
from server.api.request.prepare import invalid
from server.api.request.schema import (
    AUDIO_PART,
    ITEM_IMAGE,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ContentPart,
    FunctionDefinition,
    GivenAudio,
    GivenImage,
    GivenMessage,
    JsonSchemaFormat,
    Message,
    MessageCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SamplingBody,
    Tool,
    ToolsAllowed,
    joined,
)
from server.errors import UNSUPPORTED_CONTENT, ApiError
from server.open_values import new_hex

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
EMPTY: Mapping[str, object] = {"annotations": [], "logprobs": []}  # fields that every output_text must have
LOGPROBS = "message.output_text.logprobs"
encode = msgspec.json.encode


def new_id(prefix: str) -> str:
    """Return a new id that begins with `prefix`."""
    return f"{prefix}_{new_hex(prefix, 16)}"


def items_of(body: ResponseBody, store: ResponseStore, owner: str) -> list[InputItem]:
    """Return the input as items, with references replaced by the stored items. Raise ApiError for an item of unknown type, and for a
    reference to an item that is not stored."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    found: list[InputItem] = []
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.type not in ITEM_TYPES:
            known = ", ".join(filter(None, ITEM_TYPES))
            raise ApiError(UNSUPPORTED_CONTENT, f"{where}.type is {item.type!r:.40}; expected {known}", param=f"{where}.type")
        if item.type == "item_reference":
            kept = store.item(item.id or "", owner)
            if kept is None:
                raise invalid(f"{where}.id", f"{where} refers to {item.id!r:.80}; no such item is stored")
            found.append(InputItem.model_validate(msgspec.json.decode(kept)))
        else:
            found.append(item)
    return found


def kept_form(items: Sequence[InputItem], earlier: Items) -> Items:
    """Return items in the form in which the store keeps and lists them: each has a type and an id, and its content, if there is any, is a
    list of parts. If a previous item, or one of the `earlier` items of the conversation, has the same id, replace the id: clients page
    through lists by ids, so ids must differ."""
    kept: list[Item] = []
    taken = {item.id for item in earlier}
    for item in items:
        kind = item.type or "message"
        item_id = item.id if item.id and item.id not in taken else new_id(PREFIXES[kind])
        taken.add(item_id)
        written: dict[str, Any] = {"type": kind, **item.model_dump(exclude_none=True), "id": item_id}
        if kind not in MCP_TYPES:
            written["status"] = item.status or "completed"
        if isinstance(item.content, str):
            part = {"type": "output_text", "text": item.content, **EMPTY}
            written["content"] = [part if item.role == "assistant" else {"type": "input_text", "text": item.content}]
        elif isinstance(item.content, list) and item.role == "assistant":
            written["content"] = [{**EMPTY, **part} if part["type"] == "output_text" else part for part in written["content"]]
        written["type"] = kind
        kept.append(Item(item_id, encode(written)))
    return kept


def as_items(kept: Items) -> list[InputItem]:
    """Parse items that the store keeps."""
    return [InputItem.model_validate(msgspec.json.decode(item)) for _, item in kept]


def chat_of(body: ResponseBody, items: Sequence[InputItem], num_earlier: int, mcp: Sequence[McpFunction] = ()) -> ChatBody:
    """Return the chat request for a conversation. The first `num_earlier` of `items` are from earlier responses. `mcp`: the functions of
    MCP servers that are offered beside those of the request. Raise ApiError if there are too many items, if there are neither items nor
    instructions, if an item is not valid, or if the tool choice names a tool that no MCP server offers."""
    if len(items) > 2 * MAX_ITEMS:
        raise invalid("input", f"the conversation has {len(items)} items; expected at most {2 * MAX_ITEMS}")
    messages = _messages(items, num_earlier, mcp)
    if body.instructions is not None:
        messages.insert(0, GivenMessage(role="system", content=body.instructions, place="instructions"))
    if not messages:
        raise invalid("input", "input is empty; expected at least one item")
    tells_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    effort = body.reasoning.effort if body.reasoning is not None else None
    sampling = {name: getattr(body, name) for name in SamplingBody.model_fields if name != "truncate_prompt_tokens"}
    return ChatBody.model_construct(
        **sampling,
        model=body.model,
        messages=messages,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        tools=[*(_tool(tool) for tool in functions_of(body)), *(function.offered for function in mcp)] or None,
        tool_choice=_tool_choice(body.tool_choice, mcp),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        logprobs=tells_logprobs,
        top_logprobs=body.top_logprobs if tells_logprobs else None,
        reasoning_effort=effort,
        enable_thinking=body.enable_thinking,
        truncate_prompt_tokens=-1 if body.truncation == "auto" and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _messages(items: Sequence[InputItem], num_earlier: int, mcp: Sequence[McpFunction]) -> list[Message]:
    """Convert items to messages. Thoughts, a text of the assistant and calls that follow each other in this order become fields of one
    message; in another order, another message begins. Raise ApiError if an item lacks a field, or has a part that is not understood."""
    messages: list[Message] = []
    requests = {item.id: item for item in items if item.type == "mcp_approval_request"}
    growing: Message | None = None  # the assistant's message to which calls may still be added
    for index, item in enumerate(items):
        where = "previous_response_id" if index < num_earlier else f"input[{index - num_earlier}]"
        kind = item.type or "message"
        if kind == "function_call_output":
            growing = None
            output = _content(_required(item.output, f"{where}.output"), f"{where}.output")
            call_id = _required(item.call_id, f"{where}.call_id")
            messages.append(GivenMessage(role="tool", content=output, tool_call_id=call_id, place=where))
            continue
        if kind in MCP_TYPES:
            growing = _add_mcp(item, requests, mcp, messages, growing, where)
            continue
        if kind == "message" and item.role != "assistant":
            growing = None
            content = _content(_required(item.content, f"{where}.content"), f"{where}.content")
            messages.append(GivenMessage(role=_required(item.role, f"{where}.role"), content=content, place=where))
            continue
        text = text_of(item.content, f"{where}.content")
        if growing is None or (kind == "message" and (growing.content or growing.tool_calls)) or (kind == "reasoning" and _said(growing)):
            growing = GivenMessage(role="assistant", place=where)
            messages.append(growing)
        if kind == "message":
            growing.content = text
        elif kind == "reasoning":
            growing.reasoning_content = (growing.reasoning_content or "") + (text or text_of(item.summary, f"{where}.summary"))
        else:
            function = CalledFunction(name=_required(item.name, f"{where}.name"), arguments=item.arguments)
            call = MessageCall(id=_required(item.call_id, f"{where}.call_id"), type="function", function=function)
            growing.tool_calls = [*(growing.tool_calls or ()), call]
    return messages


def _content(content: str | Sequence[ItemPart], where: str) -> str | list[ContentPart]:
    """Return the content of a message or of a tool's output: a text, or parts if there are images or recordings. Raise ApiError if a part
    lacks its text or file, or is of an unknown type."""
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for index, part in enumerate(content):
        if part.type == AUDIO_PART:
            place = f"{where}[{index}].input_audio"
            if part.input_audio is None:
                raise invalid(place, f"{place} is absent; expected an object with data and format")
            parts.append(GivenAudio(input_audio=part.input_audio, place=f"{place}.data"))
            continue
        if part.type != ITEM_IMAGE:
            parts.append(ContentPart(type="text", text=part_text(part, f"{where}[{index}]")))
            continue
        place = f"{where}[{index}].image_url"
        if not isinstance(part.image_url, str):
            raise invalid(place, f"{place} is absent or no text; expected a URL, because images given by file_id are not supported")
        parts.append(GivenImage(image_url=part.image_url, place=place, detail=part.detail))
    return joined(parts)


def _add_mcp(
    item: InputItem,
    requests: Mapping[str | None, InputItem],
    mcp: Sequence[McpFunction],
    messages: list[Message],
    growing: Message | None,
    where: str,
) -> Message | None:
    """Add the messages of an item about an MCP server. Return the assistant's message to which calls may still be added, or None. A call is
    added together with its result. An approval adds nothing, because the item of the approved call comes later. A refusal adds the call,
    with the refusal as its result. A list of tools and a request for approval add nothing. Raise ApiError if the item lacks a field, or
    answers a request for approval that is not in the conversation."""
    if item.type == "mcp_approval_response":
        asked = requests.get(_required(item.approval_request_id, f"{where}.approval_request_id"))
        if asked is None:
            raise invalid(f"{where}.approval_request_id", f"{where} answers {item.approval_request_id!r:.80}, which no item asks")
        if _required(item.approve, f"{where}.approve"):
            return growing
        call, result = asked, f"The user did not approve this call{f': {item.reason}' if item.reason else '.'}"
    elif item.type == "mcp_call":
        output = "The call was not completed." if item.output is None else text_of(item.output, f"{where}.output")
        call, result = item, output if item.error is None else _told(item.error)
    else:
        return growing
    name = _required(call.name, f"{where}.name")
    function = function_name(mcp, _required(call.server_label, f"{where}.server_label"), name)
    called = CalledFunction(name=function, arguments=call.arguments or "{}")
    if growing is None:
        growing = GivenMessage(role="assistant", place=where)
        messages.append(growing)
    call_id = _required(call.id, f"{where}.id")
    growing.tool_calls = [*(growing.tool_calls or ()), MessageCall(id=call_id, type="function", function=called)]
    messages.append(GivenMessage(role="tool", content=result, tool_call_id=call_id, place=where))
    return None


def _told(error: str | Mapping[str, Any]) -> str:
    """Return the error of a call as a text."""
    match error:
        case str():
            return error
        case {"message": str(message)}:
            return message
        case {"content": [{"text": str(text)}]}:
            return text
        case _:
            return encode(error).decode()


def _said(message: Message) -> bool:
    """Return whether a message has text or calls already."""
    return bool(message.content or message.tool_calls)


T = TypeVar("T")


def _required(value: T | None, param: str) -> T:
    """Return a value. Raise ApiError if it is absent."""
    if value is None:
        raise invalid(param, f"{param} is absent and required")
    return value


def functions_of(body: ResponseBody) -> list[ResponseTool]:
    """Return the tools that are functions, which the client runs."""
    return [tool for tool in body.tools or () if isinstance(tool, ResponseTool)]


def ineffective(body: ResponseBody) -> list[str]:
    """Return the paths of accepted fields that have no effect, although a client may expect that they have."""
    return [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(body.reasoning, name, None) is not None]


def _tool(tool: ResponseTool) -> Tool:
    """Convert a function to a tool of a chat request."""
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _tool_choice(choice: str | ToolName | McpChoice | AllowedToolNames | None, mcp: Sequence[McpFunction]) -> object:
    """Convert the tool choice to that of a chat request. Raise ApiError if it names a tool that no MCP server offers."""
    match choice:
        case ToolName():
            return _named(choice.name)
        case McpChoice():
            return _allowed("required", [*_chosen(choice, mcp, "tool_choice")])
        case AllowedToolNames():
            where = "tool_choice.tools"
            return _allowed(choice.mode, [named for tool in choice.tools for named in _chosen(tool, mcp, where)])
        case _:
            return choice


def _allowed(mode: Literal["auto", "required"], tools: list[NamedTool | Foreign]) -> AllowedTools:
    """Return the tool choice that allows only `tools`."""
    return AllowedTools(type="allowed_tools", allowed_tools=ToolsAllowed.model_construct(mode=mode, tools=tools))


def _chosen(tool: ToolName | McpChoice | Foreign, mcp: Sequence[McpFunction], where: str) -> list[NamedTool | Foreign]:
    """Return the functions that an entry of a tool choice names: all of a server's functions for an McpChoice without a name. Return an
    entry of an unknown type as it is. Raise ApiError if an McpChoice names a server or a tool that is not offered."""
    match tool:
        case Foreign():
            return [tool]
        case ToolName():
            return [_named(tool.name)]
        case McpChoice():
            found = [one for one in mcp if one.label == tool.server_label and tool.name in (None, one.tool.name)]
            if not found:
                what = f"server {tool.server_label!r:.80}" if tool.name is None else f"{tool.name!r:.80} of {tool.server_label!r:.80}"
                raise invalid(where, f"{where} names {what}, which offers no such tool")
            return [_named(one.name) for one in found]


def _named(name: str) -> NamedTool:
    """Return the tool choice that names one function."""
    return NamedTool(type="function", function=NamedFunction(name=name))


def _format(body: ResponseBody) -> ResponseFormat | None:
    """Return the response format, or None if the answer is any text."""
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    schema = JsonSchemaFormat.model_construct(schema_=form.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)
