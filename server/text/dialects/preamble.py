"""Describe tools as text in conversations whose chat template shows no tools: in the system message, or else in the first message of the
user. Calls and results become text unless the template writes them. docs/dialects.md quotes the description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Message = dict[str, object]
INTRODUCTION = """You can call functions. These are their names, descriptions and parameters, one function a line:

{tools}

If a function helps, answer with nothing but the call, a JSON object with the function's name and its arguments:

{{"name": "function", "arguments": {{"parameter": "value"}}}}

Write one object a line to call several functions. Their results come in the next message. Otherwise, answer without a call."""


def described(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, has_system: bool, writes_calls: bool
) -> list[Message]:
    """Return the conversation with `tools` described in its text. If the template writes a system message (`has_system`), the description
    follows the text of that message. Otherwise it comes before the text of the user's first message. If there is no such message, the
    description becomes the first message. Unless the template writes calls and their results (`writes_calls`), these become text, even if
    there are no tools."""
    found = [dict(message) for message in messages] if writes_calls else _as_text(messages)
    if not tools:
        return found
    text = INTRODUCTION.format(tools="\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools))
    at = next((index for index, message in enumerate(found) if message["role"] in (("system",) if has_system else ("user",))), None)
    if at is not None:
        found[at]["content"] = f"{found[at]['content']}\n\n{text}" if has_system else f"{text}\n\n{found[at]['content']}"
    else:
        found.insert(0, {"role": "system" if has_system else "user", "content": text})
    return found


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which calls are JSON, and results are messages of the user. Templates may demand that roles alternate, so a result
    is joined with the message of the user, or the result, that follows it."""
    found: list[Message] = []
    names: dict[object, str] = {}
    follows_result = False
    for message in messages:
        made: Message = {**message}
        is_result = message["role"] == "tool"
        if calls := cast("list[dict[str, Any]]", made.pop("tool_calls", None) or []):
            functions = [call["function"] for call in calls]
            names |= {call.get("id"): function["name"] for call, function in zip(calls, functions, strict=True)}
            lines = [json.dumps({"name": one["name"], "arguments": one["arguments"]}, ensure_ascii=False) for one in functions]
            made["content"] = "\n".join(filter(None, [str(made["content"]), *lines]))
        elif is_result:
            name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
            made.update(role="user", content=f"Result of {name}:\n{message['content']}")
            for key in ("name", "tool_call_id"):
                made.pop(key, None)
        if made["role"] == "user" and follows_result:
            found[-1]["content"] = f"{found[-1]['content']}\n\n{made['content']}"
        else:
            found.append(made)
        follows_result = is_result
    return found
