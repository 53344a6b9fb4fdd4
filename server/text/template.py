"""A model's chat template: messages in, prompt text out.

TemplateError              rendering failed; `line` says where; a ValueError
    TemplateRejection      the template itself refused the messages (`raise_exception`): the client's to mend
    TemplateLimitError     it took more time or memory than it may
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from server.text.meter import METER, Meter, TemplateLimit, TemplateRaise
from server.text.sandbox import MeteredEnvironment

TIME_LIMIT_S = 2.0  # of the processor
MAX_MESSAGE_CHARS = 2000  # of an error: a template can raise any text
MEMORY_LIMIT_BYTES = 256 << 20  # of all texts and lists that one rendering makes

Message = Mapping[str, Any]


class TemplateError(ValueError):
    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"chat template, line {line}: {message}")
        self.line = line


class TemplateRejection(TemplateError):
    pass


class TemplateLimitError(TemplateError):
    pass


class ChatTemplate:
    """Compiled once, rendered from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        """`special_tokens` are variables of the template (bos_token, ...); `tool_source` is used instead when tools are given."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._memory_limit_bytes = memory_limit_bytes
        self._plain = _compile(source)
        self._with_tools = self._plain if tool_source is None else _compile(tool_source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """With `continue_final_message` the prompt ends inside the last message, for the model to go on with it."""
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
            return self._render_open(messages, tools, kwargs)
        return self._render(messages, tools, add_generation_prompt, kwargs)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,  # templates ask `tools is not none` as often as `if tools`
            "add_generation_prompt": add_generation_prompt,
            METER: Meter(time_limit_s=self._time_limit_s, memory_limit_bytes=self._memory_limit_bytes),
        }
        template = self._with_tools if tools else self._plain
        try:
            return "".join(template.generate(variables))
        except Exception as error:  # a template can provoke any of them: TypeError, KeyError, RecursionError, ...
            raise _translate(error) from error

    def _render_open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]) -> str:
        """Templates close a message behind its text, and some trim the text. A marker at its end shows where that is; the
        space after the marker shows whether trimming took place."""
        if not messages or not isinstance(content := messages[-1].get("content"), str):
            raise TemplateError("continue_final_message needs a last message whose content is text")
        marker = "\ue000"
        while any(marker in str(message) for message in messages):
            marker += "\ue001"
        marked = [*messages[:-1], {**messages[-1], "content": f"{content}{marker} "}]
        text = self._render(marked, tools, False, kwargs)
        if (end := text.rfind(marker)) < 0:
            raise TemplateError("the template does not write the last message; continue_final_message cannot be honoured")
        return text[:end] if text.startswith(f"{marker} ", end) else text[:end].rstrip()


def _compile(source: str) -> jinja2.Template:
    try:
        return MeteredEnvironment().template(source)
    except Exception as error:  # RecursionError and MemoryError of nesting too deep, beside syntax errors
        raise _translate(error) from error


def _translate(error: Exception) -> TemplateError:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return TemplateError(error.message or "syntax error", error.lineno)
    kind = TemplateError
    message = str(error)
    if isinstance(error, TemplateRaise):
        kind = TemplateRejection
    elif isinstance(error, TemplateLimit):
        kind = TemplateLimitError
    elif not isinstance(error, jinja2.TemplateError):
        message = f"{type(error).__name__}: {message}"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " ..."
    return kind(message, _line(error))


def _line(error: Exception) -> int | None:
    """Jinja gives frames of a template the template's own line numbers; the innermost of them is the place."""
    line = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
