"""Read JSON that a model has written, and write it again. Its escapes may stand for half of a surrogate pair, which no answer can carry,
and its numbers may be none of JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NoReturn, cast

import msgspec


def whole_characters(text: str) -> str:
    """Return a text in which the two halves of a character are that character. A half alone is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_json(value: object) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))


def of_json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is none, or has a number that is not finite."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def object_of(text: str) -> dict[str, Any] | None:
    """Return the object that a text has as JSON, or None if it has none; {} for an empty text. Small models leave line ends in strings
    unescaped, and write half of a surrogate pair."""
    try:
        read: object = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        try:
            read = json.loads(as_json(json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)))
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else None


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        _refuse(digits)
    return number


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number:.80} is no finite number")
