"""POST /parse_function_call and /separate_reasoning, in SGLang's shape: parse a text as an answer in a given format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context, caller
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.request.limits import check_sizes
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import Label, Tools, functions_among
from server.api.routes import gives, new_router
from server.text.dialects.format import AnswerRules
from server.text.dialects.registry import FORMATS
from server.text.dialects.thoughts import THINK, Thoughts
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning

THINKERS = ("deepseek-r1", "deepseek_r1", "qwen3")  # values of `reasoning_parser`, besides formats, for <think> and </think>
Answer = Annotated[str, Field(max_length=1 << 17)]


class ParsedBody(Options):
    """The body of /parse_function_call."""

    text: Answer
    tools: Tools
    tool_call_parser: Label | None = None  # None: the format of the model
    model: Label | None = None  # the model whose format is used if `tool_call_parser` is absent


class SeparatedBody(Options):
    """The body of /separate_reasoning."""

    text: Answer
    reasoning_parser: Label | None = None  # None: the model's own format of thoughts
    model: Label | None = None  # the model whose format is used if `reasoning_parser` is absent


class FoundCall(TypedDict):
    """A call of a function, found in the text."""

    tool_index: int  # index of the call among the calls of the text; not the index of its tool in "tools"
    name: str
    parameters: str  # JSON


class ParsedText(TypedDict):
    normal_text: str  # the text outside of calls, including thoughts
    calls: Sequence[FoundCall]


class SeparatedText(TypedDict):
    reasoning_text: str
    text: str


def router(context: Context) -> APIRouter:
    routes, strict = new_router("Text"), context.settings.strict

    @routes.post("/parse_function_call", responses=gives(ParsedText))
    async def parse_function_call(request: Request, body: ParsedBody) -> Response:
        """Find the calls in a text, as in a model's answer."""
        ignored = check_unknown(body, strict=strict)
        check_sizes(body)
        tools = [ToolSchema(tool.function.name, tool.function.parameters or {}) for tool in functions_among(body.tools)]
        if body.tool_call_parser is None:
            rules = context.serve(request, body.model)[1].dialect.rules(tools, split_reasoning=False)
        elif body.tool_call_parser in FORMATS:
            rules = AnswerRules(FORMATS[body.tool_call_parser], tools=tools)
        else:
            known = ", ".join(FORMATS)
            raise invalid("tool_call_parser", f"tool_call_parser is {body.tool_call_parser!r:.80}; expected one of {known}")
        parts = await off_loop(caller(request).num_body_bytes, lambda: _parts(rules, body.text))
        return json_answer(_parsed(parts), headers=ignored_header(ignored))

    @routes.post("/separate_reasoning", responses=gives(SeparatedText))
    async def separate_reasoning(request: Request, body: SeparatedBody) -> Response:
        """Separate the thoughts in a text from the rest of the text. A text that closes thoughts before it opens any is assumed to begin
        inside thoughts."""
        ignored = check_unknown(body, strict=strict)
        if body.reasoning_parser is None:
            dialect = context.serve(request, body.model)[1].dialect
            thoughts, form = dialect.thoughts, dialect.format
        elif body.reasoning_parser in FORMATS or body.reasoning_parser in THINKERS:
            form = FORMATS.get(body.reasoning_parser, FORMATS["hermes"])
            thoughts = next(iter(form.thoughts), None)
        else:
            known = ", ".join((*THINKERS, *FORMATS))
            raise invalid("reasoning_parser", f"reasoning_parser is {body.reasoning_parser!r:.80}; expected one of {known}")
        rules = AnswerRules(form, thoughts, _begins_inside(body.text, thoughts), splits=True)
        parts = await off_loop(caller(request).num_body_bytes, lambda: _parts(rules, body.text))
        separated: SeparatedText = {"reasoning_text": _joined(parts, Reasoning), "text": _joined(parts, Content)}
        return json_answer(separated, headers=ignored_header(ignored))

    return routes


def _begins_inside(text: str, thoughts: Thoughts | None) -> bool:
    """Return whether a text closes thoughts that it does not open. If `thoughts` is None, thoughts are those between <think> and
    </think>."""
    found = thoughts or THINK
    return found.closing in text and found.begin not in text.partition(found.closing)[0]


def _parts(rules: AnswerRules, text: str) -> list[Part]:
    """Parse a whole answer by `rules`. Return its parts."""
    parser = rules.parser()
    return [*parser.push(text), *parser.finish()]


def _parsed(parts: Sequence[Part]) -> ParsedText:
    """Return the calls among `parts`, and the content outside of calls."""
    calls: list[FoundCall] = []
    for part in parts:
        match part:
            case CallStart(index, _, name):
                calls.append({"tool_index": index, "name": name, "parameters": ""})
            case CallArguments(index, text):
                calls[index]["parameters"] += text
            case _:
                pass
    return {"normal_text": _joined(parts, Content), "calls": calls}


def _joined(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    """Return the text of all parts of one kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))
