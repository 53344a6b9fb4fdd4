"""Arguments that a format writes as text: their JSON value, as the schema of the tool says."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

Schema = Mapping[str, object]
MAX_REFERENCES = 8  # followed one after another
KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def properties(schema: Schema) -> dict[str, Schema]:
    """Return the schemas of the named properties of an object."""
    found = resolved(schema, schema).get("properties")
    return {str(name): as_schema(inner) for name, inner in found.items()} if isinstance(found, dict) else {}


def as_schema(value: object) -> Schema:
    """Return a schema as an object: `true` and anything malformed allow every value."""
    return cast("Schema", value) if isinstance(value, dict) else {}


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follow references to other parts of the schema `root`."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found: object = root
        for step in reference.split("/")[1:]:
            found = as_schema(found).get(step.replace("~1", "/").replace("~0", "~"))
        schema = as_schema(found)
    return schema


def branches(schema: Schema) -> Sequence[Schema]:
    """Return the schemas of which a value must match one, if the schema lists such."""
    for word in ("anyOf", "oneOf"):
        if isinstance(found := schema.get(word), list) and found:
            return [as_schema(one) for one in cast("list[object]", found)]
    return ()


def kinds(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; an empty set if it does not say."""
    schema = resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(map(str, cast("list[object]", named)))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(KINDS.get(type(value), "object") for value in cast("list[object]", values))
    if "const" in schema:
        return frozenset([KINDS.get(type(schema["const"]), "object")])
    found = [kinds(one, root, depth + 1) for one in branches(schema)] if depth < MAX_REFERENCES else []
    empty: frozenset[str] = frozenset()
    return empty.union(*found) if all(found) else empty


def is_text(schema: Schema, root: Schema) -> bool:
    """Return whether only texts match the schema."""
    return kinds(schema, root) == {"string"}


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
    """Return the value of a text as JSON and as Python, where it has one."""
    found: list[object] = []
    for read in (lambda: json.loads(text, parse_constant=_refuse), lambda: _plain(ast.literal_eval(text))):
        try:
            found.append(read())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    if text in ("true", "false", "null"):
        return found
    lower = {"true": True, "false": False, "none": None, "null": None}
    return [*found, lower[text.lower()]] if text.lower() in lower else found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _plain(value: object) -> object:
    """Return a Python value as JSON has it. Raise TypeError if JSON has no such value."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if value - value == 0:
            return value
        case list() | tuple():
            return [_plain(one) for one in cast("Sequence[object]", value)]
        case dict():
            return {_key(key): _plain(one) for key, one in cast("Mapping[object, object]", value).items()}
        case _:
            raise TypeError(f"{value!r:.40} is no value of JSON")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r:.40} is no key of JSON")
    return key
