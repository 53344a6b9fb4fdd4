"""Find out whether a chat template writes the calls of earlier turns with the tokens that the model wrote. If it does not, the prefix cache
holds the next prompt only up to the first token that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.interfaces import ChatTemplate, Tokenizer
from server.text.dialects.detect import IDS, PROBED, TOOLS, probed

Message = dict[str, object]
TEXTS = ("", "I look.")  # text before the calls
RESULT = "probe result"


def fault_of(tokenizer: Tokenizer) -> str:
    """Return how the next turn's prompt differs from the earlier prompt followed by an answer with calls. Return "" if the next prompt
    repeats both, if there is no chat template, or if the template refuses such answers."""
    template = tokenizer.chat_template
    if template is None:
        return ""
    faults = [_fault(tokenizer, template, text) for text in TEXTS]
    return next(filter(None, faults), "")


def _fault(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> str:
    """Return the fault for an answer with `text` and a call, or "" if there is none. If the template refuses such answers, it has no
    fault."""
    for ids in IDS:
        asked: Message = {"role": "user", "content": "probe"}
        called, results = _turn(text, ids)
        prompt = _rendered(template, [asked], answers=True)
        answered = _rendered(template, [asked, called], answers=False)
        following = _rendered(template, [asked, called, *results], answers=True)
        if prompt is None or answered is None or following is None:  # a template may refuse an id of another length, for example
            continue
        if not answered.startswith(prompt):
            return "it writes the beginning of an earlier answer otherwise than that of the next answer"
        answer = answered[len(prompt) :].rstrip()
        answer = answer[: _end_of_calls(answer)]
        if not following.startswith(prompt + answer):
            return "it writes an answer otherwise once results follow"
        written = tokenizer.encode(prompt, False) + tokenizer.encode(answer, False)
        if tokenizer.encode(following, False)[: len(written)] != written:
            return "its text before or after calls changes their tokens"
        return ""
    return ""


def _turn(text: str, ids: str) -> tuple[Message, list[Message]]:
    """Return an answer with one call, and the result of the call."""
    name, arguments = next(iter(PROBED.items()))
    call_id = ids.format(number=0, name=name)
    call: dict[str, Any] = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    called: Message = {"role": "assistant", "content": text, "tool_calls": [call]}
    return called, [{"role": "tool", "tool_call_id": call_id, "name": name, "content": RESULT}]


def _end_of_calls(answer: str) -> int:
    """Return the index after the value of the last argument, or the length of the answer if the value is not in it. The answer is compared
    up to this index, because the text after it may belong to the end of the turn."""
    last = str(next(reversed(next(iter(PROBED.values())).values())))
    at = answer.rfind(last)
    return len(answer) if at < 0 else at + len(last)


def _rendered(template: ChatTemplate, messages: Sequence[Message], *, answers: bool) -> str | None:
    """Return the prompt of a conversation, or None if the template refuses it. `answers`: the prompt ends with the beginning of an
    answer."""
    tools: list[dict[str, object]] = [
        {"type": "function", "function": {"name": tool.name, "description": tool.name, "parameters": tool.parameters}} for tool in TOOLS
    ]
    return probed(template, messages, tools=tools, add_generation_prompt=answers)
