"""Find out in which format a model writes calls: render a conversation with calls by the model's own chat template, and see which format
reads the calls back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from server.interfaces import ChatTemplate, Tokenizer
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.format import AnswerRules, Format
from server.text.dialects.registry import FORMATS, WRITTEN
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart
from server.text.templates.errors import TemplateLimitError, TemplateUnavailable

PROPERTIES = {"place": {"type": "string"}, "count": {"type": "integer"}}
PROBED = {"probe_first": {"place": "Oslo", "count": 3}, "probe_second": {"place": "Rome", "count": 5}}
TOOLS = [ToolSchema(name, {"type": "object", "properties": PROPERTIES}) for name in PROBED]
IDS = ("call{number:05}", "functions.{name}:{number}")  # forms of call ids, as Mistral and Kimi write them
DEFAULT = "json"  # name of the format if no other is found
ASKED: dict[str, object] = {"role": "user", "content": "probe"}


def usable(template: ChatTemplate | None) -> ChatTemplate | None:
    """Return the template, or None if rendering exceeds a limit even for one message. Rendering other requests would exceed the limit, too,
    and each further probe would take as long as the limit allows. Raise TemplateUnavailable as `probed` does."""
    try:
        if template is not None:
            template.render([ASKED])
    except TemplateUnavailable:
        raise
    except TemplateLimitError:
        return None
    except Exception:  # a template may raise any exception, and still accept another message
        return template
    return template


def detected(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[Format, bool]:
    """Return the format in which `template` writes calls, and True. If the template writes no calls that a format reads, or is None, return
    a format whose markers are tokens of the model, or else the format DEFAULT, and False. If the model has no chat template, return DEFAULT
    and False."""
    written = None if template is None else _written_by(template)
    if written is not None:
        return written, True
    found = None if tokenizer.chat_template is None else _in_vocabulary(tokenizer)
    return found or FORMATS[DEFAULT], False


def _in_vocabulary(tokenizer: Tokenizer) -> Format | None:
    """Return a format whose calls stand between two tokens of the vocabulary, or None if there is none. Of several such formats, prefer one
    with calls in JSON."""
    found = [form for form in WRITTEN if (calls := form.call_syntax) is not None and calls.opening and calls.closing]
    found = [form for form in found if all(len(tokenizer.encode(marker, False)) == 1 for marker in form.markers[:2])]
    return min(found, key=lambda form: not isinstance(form.call_syntax, JsonCalls), default=None)


def probed(template: ChatTemplate | None, messages: Sequence[dict[str, object]], **options: Any) -> str | None:
    """Return the prompt that the template renders from `messages`, a probe, or None if there is no template, or if the template fails. A
    probe has the limits of requests, so it fails on a slow machine only if requests fail, too. Raise TemplateUnavailable if no process
    could render the probe: the dialect of a model must not depend on the load of the machine."""
    try:
        return None if template is None else template.render(messages, **options)
    except TemplateUnavailable:
        raise
    except Exception:  # a template may raise any exception
        return None


def shows_tools(template: ChatTemplate | None) -> bool:
    """Return whether the template's prompt contains the tools of a request. Return False if there is no template, or if the template
    fails. Raise TemplateUnavailable as `probed` does."""
    name = TOOLS[0].name
    tool: dict[str, object] = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    return name in (probed(template, [ASKED], tools=[tool]) or "")


def shows_system(template: ChatTemplate | None, user: object = "probe") -> bool:
    """Return whether the template's prompt contains the text of a system message, if the user's message has the content `user`. Return
    False if there is no template, or if the template fails. Raise TemplateUnavailable as `probed` does."""
    messages: list[dict[str, object]] = [{"role": "system", "content": "probe of the system"}, {"role": "user", "content": user}]
    return "probe of the system" in (probed(template, messages) or "")


def reads_effort(template: ChatTemplate | None) -> bool:
    """Return whether the template's prompt depends on `reasoning_effort`. If it does, the model was trained to think as much as the prompt
    says. Return False if there is no template, or if the template fails. Raise TemplateUnavailable as `probed` does."""
    found = {probed(template, [ASKED], variables={"reasoning_effort": each}) for each in ("low", "high")}
    return None not in found and len(found) > 1


def _written_by(template: ChatTemplate) -> Format | None:
    """Return the format that reads back the calls which the template writes, or None if no format does. Try one call as well as two, and
    several forms of ids: some templates refuse several calls in one message, or ids of another length than Mistral's, and some write the id
    and not the name."""
    for names, ids in product((list(PROBED), list(PROBED)[:1]), IDS):
        answers = _answers(template, names, ids)
        if readers := [form for form in WRITTEN if any(_reads(form, answer, names) for answer in answers)]:
            return max(readers, key=lambda form: _fit(form, answers[-1]))
    return None


def _answers(template: ChatTemplate, names: Sequence[str], ids: str) -> list[str]:
    """Return what the template writes for an assistant's message with calls, from two places on: after the generation prompt, and after the
    user's message. A generation prompt that opens thoughts may share the beginning of a marker with the calls; the first text then lacks
    this beginning. The list is empty if the template refuses the message, and so writes no calls. Raise TemplateUnavailable as `probed`
    does."""
    functions = [{"name": name, "description": name, "parameters": tool.parameters} for name, tool in zip(PROBED, TOOLS, strict=True)]
    tools: list[dict[str, object]] = [{"type": "function", "function": function} for function in functions]
    calls = [
        {"id": ids.format(number=number, name=name), "type": "function", "function": {"name": name, "arguments": PROBED[name]}}
        for number, name in enumerate(names)
    ]
    called: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = probed(template, [ASKED, called], tools=tools, add_generation_prompt=False)
    if whole is None:
        return []
    prompts = [probed(template, [ASKED], tools=tools, add_generation_prompt=adds) for adds in (True, False)]
    return [whole[_num_shared(whole, prompt) :] for prompt in prompts if prompt is not None]


def _num_shared(text: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts, in characters."""
    return next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))


def _fit(form: Format, answer: str) -> tuple[int, int]:
    """Return a key that is larger the better a format agrees with an answer that it reads: the number of the format's signs in the answer,
    then minus the number of its signs that are missing there."""
    num_found = sum(sign in answer for sign in form.signs)
    return num_found, num_found - len(form.signs)


def _reads(form: Format, answer: str, names: Sequence[str]) -> bool:
    """Return whether a format finds exactly the calls of the probe in the answer."""
    parser = AnswerRules(form, next(iter(form.thoughts), None), splits=True, tools=TOOLS).parser()
    parts = [*parser.push(answer), *parser.finish()]
    found = [part.name for part in parts if isinstance(part, CallStart)]
    if found != list(names):
        return False
    texts = ["".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index) for index in range(len(found))]
    try:
        return [json.loads(text) for text in texts] == [PROBED[name] for name in names]
    except ValueError:
        return False
