"""Which tools a conversation offers, and whether a call is demanded. What may not be called is not shown to the model either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.prepare import invalid
from server.api.schema import AllowedTools, ChatBody, NamedTool, Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: Sequence[Tool]
    demanded: bool = False  # the answer must be a call
    single: bool = False  # of one tool, once


def tool_use(body: ChatBody) -> ToolUse:
    tools, choice = body.tools or [], body.tool_choice
    single = body.parallel_tool_calls is False
    match choice:
        case NamedTool():
            named = _named(tools, [choice], "tool_choice")
            return ToolUse(named, demanded=True, single=True)
        case AllowedTools(allowed_tools=allowed):
            named = _named(tools, allowed.tools, "tool_choice.allowed_tools")
            return ToolUse(named, demanded=allowed.mode == "required", single=single)
        case "required":
            if not tools:
                raise invalid("tool_choice", "tool_choice demands a call and tools is empty")
            return ToolUse(tools, demanded=True, single=single)
        case "none":
            return ToolUse([])
        case _:
            return ToolUse(tools, single=single)


def _named(tools: Sequence[Tool], names: Sequence[NamedTool], param: str) -> list[Tool]:
    wanted = {named.function.name for named in names}
    if unknown := wanted - {tool.function.name for tool in tools}:
        raise invalid(param, f"{param} names {min(unknown)!r:.80}, which is not among tools")
    return [tool for tool in tools if tool.function.name in wanted]
