"""Render messages to text with the model's chat template and the server's renderer, and parse answers back to messages."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from server.text.templates.limits import Limits
from server.text.templates.template import ChatTemplate
from tests.lab.training.conversation import Message, Tool

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")
_PATIENCE_S = 600.0  # seconds; our own template always ends, but a training job of low priority may be suspended for long while it renders

_template = ChatTemplate(TEMPLATE, {})
_LIMITS = Limits(time_s=_PATIENCE_S, memory_bytes=1 << 30)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool = False) -> str:
    return _template.render(messages, tools, add_generation_prompt=add_generation_prompt, limits=_LIMITS)


def rendered_parts(messages: Sequence[Message], tools: Sequence[Tool]) -> list[tuple[str, bool]]:
    """Render a conversation in pieces. Each piece has a flag that is true if the model must learn to generate it."""
    parts: list[tuple[str, bool]] = []
    done = 0
    whole = render(messages, tools)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:index], tools, add_generation_prompt=True)
        answer = render(messages[: index + 1], tools)
        begun = len(prompt) + len(message.get("given", ""))
        parts += [(whole[done:begun], False), (whole[begun : len(answer)], True)]
        done = len(answer)
    return parts


def parsed_answer(text: str) -> Message:
    """Parse the model's output as a message. A malformed call remains text instead of becoming a call."""
    try:
        named = [(call["name"], call["arguments"]) for call in map(json.loads, _CALL.findall(text))]
    except (ValueError, KeyError, TypeError):
        return {"role": "assistant", "content": text}
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in named]
    said: Message = {"role": "assistant", "content": _CALL.sub("", text).strip()}
    return {**said, "tool_calls": functions} if functions else said
