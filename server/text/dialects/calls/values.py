"""Arguments that a format writes as text: their JSON value, as the schema of the tool says."""

from __future__ import annotations

import json
from typing import NoReturn

from server.text.dialects.calls.literal_reader import Malformed, read_value
from server.text.dialects.calls.literals import PYTHON
from server.text.dialects.calls.schemas import KINDS, Schema, kinds
from server.text.dialects.calls.stream import Stream


def json_of(text: str, schema: Schema, root: Schema) -> str:
    """Return the JSON of a value that was written as text. Text that is no value of an allowed type stays text."""
    allowed = kinds(schema, root)
    for value in _readings(text.strip()):
        kind = KINDS[type(value)]
        if kind == "string":
            continue
        if not allowed or kind in allowed or (kind == "integer" and "number" in allowed):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and "integer" in allowed and value.is_integer():
            return json.dumps(int(value))
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> list[object]:
    """Return the values that a text has if it is read as JSON and as Python: two, one or none."""
    found: list[object] = []
    for read in (_as_json, _as_python):
        try:
            found.append(read(text))
        except (ValueError, Malformed, RecursionError):
            continue
    return found


def _as_json(text: str) -> object:
    return json.loads(text, parse_constant=_refuse)


def _as_python(text: str) -> object:
    stream = Stream()
    stream.held, stream.ended = text + ")", True  # the parenthesis ends the value
    steps = read_value(stream, PYTHON)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            if stream.held != ")":
                raise Malformed(cut=False) from None
            return end.value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
