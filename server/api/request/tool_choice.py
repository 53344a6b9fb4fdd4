"""The tools that a conversation offers, whether a call is required, and the constraints on calls. A tool that may not be called is not
shown to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.request.prepare import invalid
from server.api.request.schema import AllowedTools, ChatBody, NamedFunction, NamedTool, Tool
from server.interfaces import Tokenizer
from server.messages import Constraint, ConstraintKind, Trigger
from server.models.model import Loaded
from server.text.dialect import Dialect
from server.text.grammar import ToolSchema, beginnings, calls_behind_marker
from server.text.reasoning import CLOSE, OPEN
from server.text.tools import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: Sequence[Tool]
    demanded: bool = False  # the answer must be a call
    single: bool = False  # at most one call


def with_tools(body: ChatBody) -> ChatBody:
    """Return a request with `functions` and `function_call` as one with `tools` and `tool_choice`, which have replaced them. An answer to
    functions has at most one call."""
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
                raise invalid("tool_choice", "tool_choice demands a call and tools is empty; offer at least one tool")
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


def demanded_calls(use: ToolUse, dialect: Dialect, max_bytes: int) -> Constraint:
    """Return the constraint for an answer that consists of calls only, with arguments that match the schemas."""
    schemas = [ToolSchema(tool.function.name, tool.function.parameters or {}) for tool in use.tools]
    constraint = dialect.forced_calls(schemas, several=not use.single)
    if len(constraint.source.encode()) > max_bytes:
        raise invalid("tools", f"the schemas of tools have more than {max_bytes} bytes; shorten them")
    return constraint


def offered_calls(use: ToolUse, loaded: Loaded, max_bytes: int, *, splits: bool, thinking: bool) -> Constraint | None:
    """Return the constraint on optional calls: they may name only offered tools, and arguments of strict tools match the schema. Return
    None, which leaves the model unconstrained, if special tokens do not mark where calls and thoughts begin, or if the schemas are too
    large. `splits`: thoughts are separated from the answer, so calls inside them are ignored."""
    form, specials = loaded.dialect.tools, loaded.dialect.specials
    splits_text = splits and not {OPEN, CLOSE} <= specials.keys()
    if not use.tools or form.bare or form.opening not in specials or splits_text:
        return None
    strict = [ToolSchema(tool.function.name, tool.function.parameters or {} if tool.function.strict else None) for tool in use.tools]
    names = [ToolSchema(tool.name, None) for tool in strict]
    sources = dict.fromkeys(calls_behind_marker(form, tools, specials, several=not use.single) for tools in (strict, names))
    fitting = [source for source in sources if len(source.encode()) <= max_bytes]
    if not fitting:
        return None
    offers = _offers(form, names, loaded.tokenizer, specials[form.opening])
    trigger = Trigger(specials[form.opening], offers)
    if splits:
        trigger = Trigger(specials[form.opening], offers, specials[OPEN], specials[CLOSE], is_open=thinking)
    return Constraint(ConstraintKind.GRAMMAR, fitting[0], trigger, "".join(fitting[1:]))


def _offers(form: ToolFormat, tools: Sequence[ToolSchema], tokenizer: Tokenizer, opening_id: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that may follow the token which opens a call. The texts are encoded together with that token, because some
    tokenizers encode the beginning of a text differently."""
    texts = [form.opening + text for tool in tools for text in beginnings(form, tool.name)]
    encoded = [tuple(tokenizer.encode(text, False)) for text in texts]
    return tuple(dict.fromkeys(ids[1:] for ids in encoded if ids[0] == opening_id))
