"""Read JSON that a model has written, and write it again. A model's escapes may stand for half of a surrogate pair, which no answer can
carry, and its numbers may be infinite or NaN, which JSON does not have."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NoReturn, cast

import msgspec


def whole_characters(text: str) -> str:
    """Return a text with each surrogate pair as one character. A lone half of a pair becomes a replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class StringEscaper:
    """Escapes control characters within the strings of a JSON object that arrives in pieces: small models write line ends in strings
    without escapes, and no client can read such JSON. Text that is no object stays as it is."""

    def __init__(self) -> None:
        self.inside = False  # the text so far ends inside a string
        self._first = ""  # the first character that is no white space
        self._is_escape = False  # the text so far ends with the backslash of an escape

    def escaped(self, text: str) -> str:
        """Return the next piece of the text, with its control characters escaped."""
        return "".join(map(self.escaped_char, text))

    def escaped_char(self, char: str) -> str:
        """Return the next character, or its escape if it is a control character in a string. If a backslash came before the control
        character, return only the rest of the escape."""
        self._first = self._first or char.strip()
        if not self.inside:
            self.inside = char == '"' and self._first == "{"
            return char
        is_escape, self._is_escape = self._is_escape, char == "\\" and not self._is_escape
        self.inside = is_escape or char != '"'
        return json.dumps(char)[2 if is_escape else 1 : -1] if char < " " else char


def as_json(value: object) -> str:
    """Return a value as JSON, with a replacement character for each lone half of a surrogate pair."""
    return whole_characters(json.dumps(value, ensure_ascii=False))


def of_json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if the text is not JSON, or has a number that is not finite."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def object_of(text: str) -> dict[str, Any] | None:
    """Parse a text as JSON, and return the object that it contains. Return {} for an empty text, and None if the text is no JSON object. A
    lone half of a surrogate pair, which small models may write, is replaced."""
    try:
        read: object = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        try:
            read = json.loads(as_json(of_json(text)))
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else None


def ends_early(arguments: str) -> bool:
    """Return whether the arguments of a call end before they are complete: there is nothing but white space, or the text begins an object
    or a list and does not end it. Other text may be complete, although it is wrong."""
    if object_of(arguments) is not None:
        return not arguments
    strings, depth = StringEscaper(), 0
    for char in arguments.lstrip():
        was_inside = strings.inside
        strings.escaped_char(char)
        if not (was_inside or strings.inside):
            depth += (char in "{[") - (char in "}]")
            if not depth:
                return False
    return True


def _finite(digits: str) -> float:
    """Return the number that `digits` stand for. Raise ValueError if it is too large for a float."""
    if not isfinite(number := float(digits)):
        _refuse(digits)
    return number


def _refuse(number: str) -> NoReturn:
    """Raise ValueError for a number that JSON does not have."""
    raise ValueError(f"{number:.80} is no finite number")
