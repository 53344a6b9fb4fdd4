"""Messages as clients send them into messages as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.api.limits import read_json
from server.api.prepare import invalid
from server.api.schema import Message
from server.errors import INVALID_JSON, UNSUPPORTED_CONTENT, ApiError

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def for_template(messages: Sequence[Message]) -> list[dict[str, object]]:
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, object]:
    rendered: dict[str, object] = {**(message.model_extra or {})}
    rendered["role"] = "system" if message.role == "developer" else message.role
    rendered["content"] = text_of(message.content, f"{where}.content")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]
    elif message.content is None:
        raise invalid(f"{where}.content", f"{where} has neither content nor tool_calls")
    return rendered


def text_of(content: str | Sequence[Mapping[str, object]] | None, where: str = "content") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise ApiError(
                UNSUPPORTED_CONTENT,
                f"{where}[{index}] has type {kind!r:.40}; only text is understood",
                param=f"{where}[{index}].type",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(f"{where}[{index}].text", f"{where}[{index}] has no text")
        texts.append(text)
    return "".join(texts)


def _call(call: Mapping[str, object], where: str) -> dict[str, object]:
    """Templates want the arguments as an object; the API has them as a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function", f"{where} has no function with a name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except ApiError as error:
            if error.kind is not INVALID_JSON:
                raise
            # a call that was cut off; the template gets it as it was
    return {**call, "function": {**function, "arguments": arguments}}
