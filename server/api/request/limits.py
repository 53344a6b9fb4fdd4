"""Check limits on a whole request, beyond the limits of its single fields. Each limit is checked before the work that it bounds.

No call may hold the GIL for longer than about ten milliseconds, because every stream waits meanwhile. Calls that parse, validate, copy or
encode JSON hold the GIL. So the number of values is limited (`server/http/json_scan.py`), and so is their length (here and in `schema.py`).
"""

from __future__ import annotations

import msgspec
from pydantic import BaseModel

from server.errors import INVALID_JSON, INVALID_VALUE, ApiError
from server.http.json_scan import JsonScan

MAX_OBJECT_CHARS = 1 << 20  # largest number of characters in a field such as tools, documents or metadata
MAX_PROMPT_LOGPROBS = 1 << 17  # largest number of log-probabilities for all prompts of a request
PROMPTS = frozenset({"messages", "prompt", "input"})  # the model's context limits these fields instead of MAX_OBJECT_CHARS


def check_sizes(body: BaseModel) -> None:
    """Raise ApiError if a field of a body, other than PROMPTS, has too many characters."""
    for name in type(body).model_fields:
        if name not in PROMPTS and num_chars(getattr(body, name), MAX_OBJECT_CHARS) > MAX_OBJECT_CHARS:
            raise ApiError(INVALID_VALUE, f"{name} has more than {MAX_OBJECT_CHARS} characters; expected at most that many", param=name)


def check_num_logprobs(num_tokens: int, num_alternatives: int | None, param: str) -> None:
    """Raise ApiError if a request asks for too many log-probabilities of prompt tokens, including those of alternative tokens."""
    num = num_tokens * (1 + (num_alternatives or 0))
    if num_alternatives is not None and num > MAX_PROMPT_LOGPROBS:
        message = f"{param} asks for {num} log-probabilities of the prompt; expected at most {MAX_PROMPT_LOGPROBS}: ask for fewer"
        raise ApiError(INVALID_VALUE, message, param=param)


def num_chars(value: object, most: int) -> int:
    """Count the characters of all texts and dictionary keys in `value`, and 1 for each dictionary entry, each list, and each value such as
    a number or None. Stop once the count exceeds `most`."""
    pending, num = [value], 0
    while pending and num <= most:
        match pending.pop():
            case str() as text:
                num += len(text)
            case dict() as fields:
                num += len(fields)
                pending += fields
                pending += fields.values()
            case list() as items:
                num += 1
                pending += items
            case BaseModel() as model:
                pending += model.__dict__.values()
                pending.append(model.model_extra)
            case _:
                num += 1
    return num


def read_json(text: str) -> object:
    """Parse JSON that a client sent inside a JSON string. Raise ApiError if it is not valid, or exceeds a limit of `JsonScan`."""
    data = text.encode()
    JsonScan().feed(data)
    try:
        return msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ApiError(INVALID_JSON, str(error)) from error
