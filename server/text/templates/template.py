"""Render a model's chat template: turn messages into the text of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jinja2

from server.text.templates.errors import TemplateError, TemplateLimitError, TemplateRejection
from server.text.templates.limits import LIMITS, RESERVED, Limits
from server.text.templates.meter import Meter, TemplateLimit, TemplateRaise
from server.text.templates.roles import forms
from server.text.templates.sandbox import MeteredEnvironment

MAX_MESSAGE_CHARS = 2000  # longest error message: a template can raise any text

# Some templates, such as those of R1 distills, compare a content with none: they expect none as the content of an assistant's message that
# has only calls.
TESTS_NONE = re.compile(r"""\bcontent(['"]\])?\s+(is(\s+not)?|==|!=)\s+none\b""", re.IGNORECASE)

# A template that loops over a content and does not ask whether it is a string expects a list of parts, such as those of vision models.
LOOPS = re.compile(r"""\bfor\s+\w+\s+in\s+message(\.content|\[\s*['"]content['"]\s*\])""")
TESTS_STRING = re.compile(r"""\bcontent(['"]\s*\])?\s+is\s+(not\s+)?string\b""")

MARKER, FILLER = "\ue000", "\ue001"  # private-use characters, which hardly any text contains

Message = Mapping[str, Any]


def reads_parts(source: str) -> bool:
    """Return whether a template reads a content only as a list of parts."""
    return LOOPS.search(source) is not None and TESTS_STRING.search(source) is None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled template, and how it reads messages."""

    environment: MeteredEnvironment
    template: jinja2.Template
    tests_none: bool  # whether the template compares a content with none
    reads_parts: bool

    @staticmethod
    def of(source: str) -> _Compiled:
        """Compile a template. Raise TemplateError if it is broken."""
        environment = MeteredEnvironment()
        return _Compiled(environment, _compile(environment, source), TESTS_NONE.search(source) is not None, reads_parts(source))


class ChatTemplate:
    """A template that is compiled once and can be rendered on any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """`special_tokens` are variables of the template (bos_token, ...). `tool_source` replaces `source` if tools are given. Raise
        TemplateError if a template is broken."""
        self.source = source
        self.tool_source = tool_source
        self.special_tokens = dict(special_tokens)
        self._plain = _Compiled.of(source)
        self._with_tools = self._plain if tool_source is None else _Compiled.of(tool_source)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.source, self.special_tokens, self.tool_source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        variables: Mapping[str, Any] | None = None,
        limits: Limits = LIMITS,
    ) -> str:
        """Return the prompt. `variables` are further variables of the template, under any name that is not reserved. With
        `continue_final_message` the prompt ends inside the last message, so that the model continues it. Raise TemplateError if the
        template refuses the messages or fails, if a variable has a reserved name, or if the last message cannot be continued.
        `continue_final_message` and `add_generation_prompt` exclude each other."""
        variables = variables or {}
        if taken := RESERVED & variables.keys():
            raise TemplateError(f"{min(taken)} is a reserved name of chat templates; choose another name")
        if not continue_final_message:
            return self._render(messages, tools, add_generation_prompt, variables, limits)
        if add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        return self._render_open(messages, tools, variables, limits)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        limits: Limits,
    ) -> str:
        """Render the messages or, if the template refuses them, the first of their `forms` that it accepts. All tries together keep to
        `limits`. `variables` have no reserved names. Raise TemplateError if the template fails, or writes half of a surrogate pair; if it
        refuses the messages and accepts no form, the error is the refusal of the messages as they came."""
        meter = Meter(limits)
        try:
            return self._tried(messages, tools, add_generation_prompt, variables, meter)
        except TemplateRejection:
            for form in forms(messages):
                with suppress(TemplateError):  # an error would describe a form that the client does not know
                    return self._tried(form, tools, add_generation_prompt, variables, meter)
            raise

    def _tried(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        meter: Meter,
    ) -> str:
        """Render with the template for these tools, after changing the messages as the template expects. If rendering raises a TypeError,
        try again with the arguments of calls as JSON text. Raise TemplateError if the template refuses the messages, fails, or writes half
        of a surrogate pair."""
        compiled = self._with_tools if tools else self._plain
        if compiled.tests_none:
            messages = [_without_empty_content(message) for message in messages]
        if compiled.reads_parts:
            messages = [_in_parts(message) for message in messages]
        names = {
            **self.special_tokens,
            **variables,
            "messages": messages,
            "tools": tools or None,  # None, not []: some templates test `tools is not none`, others `if tools`
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = compiled.environment.rendered(compiled.template, names, meter)
        except Exception as error:  # a template can provoke any exception: TypeError, KeyError, RecursionError, ...
            # Later renderings first try the arguments as objects, too: these messages may be the reason for the failure, and a prompt must
            # not depend on earlier requests.
            written = _with_written_arguments(messages) if isinstance(error, TypeError) else None
            if written is None:
                raise _translate(error) from error
            return self._tried(written, tools, add_generation_prompt, variables, meter)
        if (found := _lone_surrogate(text)) is not None:
            raise TemplateError(f"the chat template writes {found[0]}, half of a surrogate pair, which is no character")
        return text

    def _render_open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        limits: Limits,
    ) -> str:
        """Render a prompt that ends inside the last message. Templates add text after each message, and some trim the message. A marker and
        a space appended to the message show where the message ends in the prompt; if the space is missing there, the template trimmed the
        message. Raise TemplateError if the last message is no text, or if the template does not write it."""
        if not messages or not isinstance(content := messages[-1].get("content"), str):
            raise TemplateError("continue_final_message needs a last message whose content is text")
        try:
            marker = _marker_beside([messages, tools, variables, self.special_tokens, self.source, self.tool_source])
        except RecursionError as error:
            raise TemplateError("the messages nest too deeply") from error
        marked = [*messages[:-1], {**messages[-1], "content": f"{content}{marker} "}]
        text = self._render(marked, tools, False, variables, limits)
        if (end := text.rfind(marker)) < 0:
            raise TemplateError("the template does not write the last message, so continue_final_message is not possible")
        return text[:end] if text.startswith(f"{marker} ", end) else text[:end].rstrip()


def _without_empty_content(message: Message) -> Message:
    """If an assistant's message has calls and an empty text, return it with None as its content. Return any other message unchanged."""
    has_only_calls = message.get("role") == "assistant" and message.get("tool_calls") and message.get("content") == ""
    return {**message, "content": None} if has_only_calls else message


def _in_parts(message: Message) -> Message:
    """Return a message with its text as a list of parts, which is empty for an empty text. If the content is no text, return the message
    unchanged."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if content else []} if isinstance(content, str) else message


def _with_written_arguments(messages: Sequence[Message]) -> Sequence[Message] | None:
    """Return the messages with the arguments of calls as JSON text. Return None if no arguments are objects, or if some are nested too
    deeply. DeepSeek's templates append the arguments to a text, so they fail on the objects that other templates expect."""
    try:
        found = [_with_written_calls(message) for message in messages]
    except RecursionError:
        return None
    return found if any(new is not old for new, old in zip(found, messages, strict=True)) else None


def _with_written_calls(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text; the message itself if nothing changes."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = [_with_text(call) for call in calls]
    return {**message, "tool_calls": written} if any(new is not old for new, old in zip(written, calls, strict=True)) else message


def _with_text(call: Any) -> Any:
    """Return a call with its arguments as JSON text; the call itself if they are no object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def rebuilt(source: str, special_tokens: Mapping[str, str], tool_source: str | None) -> ChatTemplate:
    """Return the template that pickle has sent to this process."""
    return ChatTemplate(source, special_tokens, tool_source=tool_source)


def _marker_beside(values: object) -> str:
    """Return a text that occurs nowhere in `values`, which clients control. Raise RecursionError if they nest too deeply."""
    text = json.dumps(values, ensure_ascii=False)
    longest = max(map(len, re.findall(f"{MARKER}({FILLER}*)", text)), default=-1)
    return MARKER + FILLER * (longest + 1)


def _compile(environment: MeteredEnvironment, source: str) -> jinja2.Template:
    """Compile a template. Raise TemplateError if it is broken, too large, or has half a surrogate pair."""
    if (found := _lone_surrogate(source)) is not None:
        surrogate, position = found
        message = f"the template has {surrogate}, half of a surrogate pair, which is no character"
        raise TemplateError(message, source.count("\n", 0, position) + 1)
    try:
        return environment.template(source)
    except Exception as error:  # syntax errors, and RecursionError or MemoryError if it nests too deeply
        raise _translate(error) from error


def _translate(error: Exception) -> TemplateError:
    """Return the TemplateError for an error of Jinja, of the meter, or of the template's code."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return TemplateError(_printable(error.message or "syntax error"), error.lineno)
    kind = TemplateError
    message = str(error)
    if isinstance(error, TemplateRaise):
        kind = TemplateRejection
    elif isinstance(error, TemplateLimit):
        kind = TemplateLimitError
    elif not isinstance(error, jinja2.TemplateError):
        message = f"{type(error).__name__}: {message}"
    return kind(_printable(message), _line(error))


def _printable(message: str) -> str:
    """Return a message that an answer can carry: of limited length, and without lone surrogates."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " ..."
    return message.encode(errors="backslashreplace").decode()


def _lone_surrogate(text: str) -> tuple[str, int] | None:
    """Return the name and the position of the first lone surrogate, or None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):X}", error.start
    return None


def _line(error: Exception) -> int | None:
    """Return the template's line that raised the error, or None if no line did. Jinja gives frames of a template the template's own line
    numbers; the innermost such frame counts."""
    line = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
