"""Decide which tools a conversation offers and whether a call is required, and make the constraints on calls. A tool that may not be called
is not shown to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.request.prepare import invalid
from server.api.request.schema import AllowedTools, ChatBody, NamedFunction, NamedTool, Tool, functions_among
from server.messages import Constraint, ConstraintKind
from server.models.model import Loaded
from server.text.dialects.calls.plain_calls import plain_grammar
from server.text.dialects.dialect import Dialect
from server.text.dialects.tool import ToolSchema
from server.text.grammar import MAX_CHARS, GrammarTooLarge


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call."""

    tools: Sequence[Tool]
    demanded: bool = False  # the answer must be a call
    single: bool = False  # at most one call

    @property
    def schemas(self) -> list[ToolSchema]:
        """The names and parameter schemas of the tools, for grammars and parsers."""
        return [ToolSchema(tool.function.name, tool.function.parameters or {}) for tool in self.tools]


def with_tools(body: ChatBody) -> ChatBody:
    """Convert `functions` and `function_call` of a request to `tools` and `tool_choice`, which have replaced them in OpenAI's API. A
    request with neither `functions` nor `function_call` is returned as it is. The answer to a request with `functions` has at most one
    call. Raise ApiError if the request has fields of both kinds, or if `function_call` names a function that the request does not offer."""
    if body.functions is None and body.function_call is None:
        return body
    if body.tools is not None or body.tool_choice is not None:
        raise invalid("functions", "functions or function_call are given beside tools or tool_choice; use tools and tool_choice")
    choice, functions = body.function_call, body.functions or []
    if isinstance(choice, NamedFunction):
        if choice.name not in {function.name for function in functions}:
            raise invalid("function_call", f"function_call names {choice.name!r:.80}, which is not among functions")
        choice = NamedTool(type="function", function=choice)
    tools = [Tool(type="function", function=function) for function in functions]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


def tool_use(body: ChatBody) -> ToolUse:
    """Return which tools an answer may or must call. Raise ApiError if the tool choice names a tool that is not offered, or demands a call
    and leaves no tool to call."""
    tools, choice = functions_among(body.tools), body.tool_choice
    single = body.parallel_tool_calls is False
    match choice:
        case NamedTool():
            named = _named(tools, [choice], "tool_choice")
            return ToolUse(named, demanded=True, single=True)
        case AllowedTools(allowed_tools=allowed):
            named = [tool for tool in allowed.tools if isinstance(tool, NamedTool)]
            return _demanding(ToolUse(_named(tools, named, "tool_choice.allowed_tools"), allowed.mode == "required", single))
        case "required":
            return _demanding(ToolUse(tools, demanded=True, single=single))
        case "none":
            return ToolUse([])
        case _:
            return ToolUse(tools, single=single)


def _demanding(use: ToolUse) -> ToolUse:
    """Return `use`. Raise ApiError if it demands a call and offers no tool."""
    if use.demanded and not use.tools:
        raise invalid("tool_choice", "tool_choice demands a call and tools has no function to call; offer at least one")
    return use


def _named(tools: Sequence[Tool], names: Sequence[NamedTool], param: str) -> list[Tool]:
    """Return the tools that the field `param` names. Raise ApiError if a named tool is not offered."""
    wanted = {named.function.name for named in names}
    if unknown := wanted - {tool.function.name for tool in tools}:
        raise invalid(param, f"{param} names {min(unknown)!r:.80}, which is not among tools")
    return [tool for tool in tools if tool.function.name in wanted]


def demanded_calls(use: ToolUse, dialect: Dialect, max_bytes: int) -> Constraint:
    """Return the constraint for an answer that consists of calls only, with arguments that match the schemas. Raise ApiError if the grammar
    has more than MAX_CHARS characters or more than `max_bytes` bytes."""
    try:
        constraint = dialect.forced_calls(use.schemas, several=not use.single)
    except GrammarTooLarge as error:
        raise invalid("tools", f"the grammar of the tools' schemas has more than {MAX_CHARS} characters; shorten them") from error
    if len(constraint.source.encode()) > max_bytes:
        raise invalid("tools", f"the grammar of the tools' schemas has more than {max_bytes} bytes; shorten them")
    return constraint


def possible_calls(use: ToolUse, dialect: Dialect) -> Constraint | None:
    """Return the constraint on calls that may take the place of an answer in JSON. Return None if no tools are offered, or if the first
    token of a call does not distinguish it from JSON. Calls may name only offered tools. The arguments may be any object: if the tools'
    schemas were part of the constraint, one that cannot be compiled would make the request fail."""
    if not use.tools or not dialect.announces_calls:
        return None
    return dialect.forced_calls([ToolSchema(tool.function.name) for tool in use.tools], several=not use.single)


def offered_calls(use: ToolUse, loaded: Loaded, max_bytes: int, *, splits: bool, thinking: bool) -> Constraint | None:
    """Return the constraint on optional calls: they may name only offered tools, and arguments of strict tools match the schema. If the
    grammar of the schemas is too large or cannot be compiled, arguments may be any object. Return None, which leaves the model
    unconstrained, if there are no tools, if no tokens tell where calls and thoughts begin, or if even the grammar of the names is too
    large. `splits`: thoughts are separated from the answer, so calls inside them are ignored. `thinking`: the prompt has opened a block of
    thoughts."""
    strict = [ToolSchema(tool.function.name, tool.function.parameters or {} if tool.function.strict else None) for tool in use.tools]
    names = [tool.name for tool in strict]
    trigger = loaded.dialect.trigger(names, loaded.tokenizer, splits=splits, thinking=thinking)
    if not use.tools or trigger is None:
        return None
    dialect, kinds = loaded.dialect, (strict, [ToolSchema(name) for name in names])
    marked = [_behind_trigger(dialect, tools, several=not use.single) for tools in kinds] if trigger.token_id is not None else []
    plain = [plain_grammar(tools) for tools in kinds] if trigger.plain else []
    source, fallback = _fitting(marked, max_bytes)
    plain_source, plain_fallback = _fitting(plain, max_bytes)
    if not (source or plain_source):
        return None
    return Constraint(ConstraintKind.GRAMMAR, source, trigger, fallback, plain=plain_source, plain_fallback=plain_fallback)


def _behind_trigger(dialect: Dialect, tools: Sequence[ToolSchema], *, several: bool) -> str:
    """Return the grammar of calls after the token that opens them, or an empty text if the grammar would be too large."""
    try:
        return dialect.behind_trigger(tools, several=several)
    except GrammarTooLarge:
        return ""


def _fitting(sources: Sequence[str], max_bytes: int) -> tuple[str, str]:
    """Return the first two different grammars that have at most `max_bytes` bytes. An empty text stands for a missing grammar."""
    fitting = [source for source in dict.fromkeys(sources) if source and len(source.encode()) <= max_bytes]
    first, second, *_ = (*fitting, "", "")
    return first, second
