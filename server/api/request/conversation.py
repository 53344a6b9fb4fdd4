"""Convert messages from the format that clients send to the format that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from server.api.request.limits import read_json
from server.api.request.prepare import invalid
from server.api.request.schema import (
    AUDIO_PART,
    AUDIO_PARTS,
    IMAGE_PART,
    ITEM_IMAGE,
    TEXT_PARTS,
    VIDEO_PARTS,
    ContentPart,
    GivenMessage,
    Message,
    MessageCall,
)
from server.errors import INVALID_JSON, UNSUPPORTED_CONTENT, ApiError

ROLES = {"developer": "system", "function": "tool"}  # other names of the roles `system` and `tool`
NO_MARKERS: Mapping[str, str] = MappingProxyType({})
NOT_UNDERSTOOD = {  # by the type of a part: the explanation in the error that refuses the part
    IMAGE_PART: "no images are understood here; send only texts, or ask a vision model in chat",
    **dict.fromkeys((ITEM_IMAGE, "image"), f"an image is a part of type {IMAGE_PART} in chat, and {ITEM_IMAGE} in /v1/responses"),
    **dict.fromkeys(AUDIO_PARTS, "no audio is understood here; send only texts, or ask a model that hears in chat"),
    "audio": f"audio is a part of type {AUDIO_PART}",
    **dict.fromkeys(VIDEO_PARTS, "no model here understands video; send some of its images, or its sound"),
}


def for_template(messages: Sequence[Message], markers: Mapping[str, str] = NO_MARKERS) -> list[dict[str, object]]:
    """Return the messages for a template. `markers`: by the type of a part, the text that stands for such a part in a content. Raise
    ApiError for a part that is no text and whose type has no marker."""
    return [_message(message, place_of(message, index), markers) for index, message in enumerate(messages)]


def place_of(message: Message, index: int) -> str:
    """Return the path of a message in the client's request. `index` is its index in the conversation."""
    return message.place if isinstance(message, GivenMessage) else f"messages[{index}]"


def _message(message: Message, where: str, markers: Mapping[str, str]) -> dict[str, object]:
    """Return a message for a template. Fields that the server does not know stay as they are. The message's `refusal` replaces a content
    that is absent or empty. `function_call` becomes `tool_calls`. Raise ApiError if the message has a part that is not understood, if the
    arguments of a call exceed a limit of `server/http/json_scan.py`, or if a message of another role than `assistant` has neither content
    nor calls."""
    rendered: dict[str, object] = {**(message.model_extra or {})}
    rendered["role"] = ROLES.get(message.role, message.role)
    rendered["content"] = text_of(message.content, f"{where}.content", markers) or message.refusal or ""
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            rendered[name] = value
    calls = message.tool_calls or ([MessageCall(function=message.function_call)] if message.function_call else [])
    if calls:
        rendered["tool_calls"] = [_call(call) for call in calls]
    if reasoning is not None and not (calls and rendered["content"]):
        rendered["thinking"] = reasoning  # gpt-oss's template uses this name, and refuses thoughts in a message with calls and content
    if not calls and message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content", f"{where} has neither content nor tool_calls; expected one of them")
    return rendered


def text_of(content: str | Sequence[ContentPart] | None, where: str = "content", markers: Mapping[str, str] = NO_MARKERS) -> str:
    """Return the text of a content, with markers in place of its images and recordings. Raise ApiError for any other part that is no text,
    or if a text contains a marker."""
    if content is None or isinstance(content, str):
        return _without(markers, content or "", where)
    texts: list[str] = []
    for index, part in enumerate(content):
        if (marker := markers.get(part.type)) is not None:
            texts.append(marker)
            continue
        texts.append(_without(markers, part_text(part, f"{where}[{index}]"), f"{where}[{index}].text"))
    return "".join(texts)


def part_text(part: ContentPart, where: str) -> str:
    """Return the text of a part. Raise ApiError if the part has no text."""
    if part.type not in TEXT_PARTS:
        what = NOT_UNDERSTOOD.get(part.type, "only text is understood")
        raise ApiError(UNSUPPORTED_CONTENT, f"{where} has type {part.type!r:.40}; {what}", param=f"{where}.type")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid(f"{where}.text", f"{where} has no text")
    return text


def _without(markers: Mapping[str, str], text: str, where: str) -> str:
    """Return `text`. Raise ApiError if it contains a marker, because markers stand for images and recordings."""
    if marker := next((marker for marker in markers.values() if marker and marker in text), ""):
        raise invalid(
            where, f"{where} has the text {marker!r}, which stands for an image or a recording; leave it out, or write it otherwise"
        )
    return text


def _call(call: MessageCall) -> dict[str, object]:
    """Return a tool call for the template. Templates expect arguments as an object, while the API has them as a string. A string that is
    not JSON stays as it is, because the arguments may have been cut off. Raise ApiError if the arguments exceed a limit of
    `server/http/json_scan.py`."""
    arguments: object = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ApiError as error:
            if error.kind is not INVALID_JSON:
                raise
    function = {**(call.function.model_extra or {}), "name": call.function.name, "arguments": arguments}
    rendered: dict[str, object] = {**(call.model_extra or {}), "type": "function", "function": function}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered
