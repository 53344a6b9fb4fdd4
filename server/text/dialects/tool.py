"""Describe the tools that a request offers, as grammars and parsers need them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from server.text.grammar import json_text

COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties", "enum", "const"})


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that a request offers: its name, and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, object] | None = None  # None: any JSON object

    @property
    def object_schema(self) -> dict[str, object]:
        """The schema of the arguments, which are an object: the tool's own schema, changed by `closed`, or a schema that allows any
        properties if the tool has no schema."""
        return {"type": "object", **({} if self.parameters is None else closed(self.parameters))}


def closed(schema: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of a call's arguments, changed to refuse properties that it does not name: `additionalProperties` becomes false
    where it is absent, also in objects within objects and lists if they name properties. A schema that is malformed, or has a keyword of
    COMPOSED, is not changed: other schemas may name further properties of the object. An object that requires a property without naming it
    is not changed itself; only the objects within it are."""
    given, required = schema.get("properties", {}), schema.get("required", [])
    if COMPOSED & schema.keys() or not (isinstance(given, dict) and isinstance(required, list)):
        return {**schema}
    properties = cast("dict[str, object]", given)
    made: dict[str, object] = {**schema, "properties": {name: _closed_within(inner) for name, inner in properties.items()}}
    if set(map(str, required)) <= properties.keys():  # an object must not refuse a property that it requires
        made.setdefault("additionalProperties", False)
    return made


def _closed_within(schema: object) -> object:
    """Return the schema of a property, in which objects that name properties are closed, also those in lists."""
    match schema:
        case {"properties": dict()}:
            return closed(cast("Mapping[str, object]", schema))
        case {"items": dict() as items}:
            return {**cast("Mapping[str, object]", schema), "items": _closed_within(items)}
        case _:
            return schema


def by_schema(tools: Sequence[ToolSchema]) -> dict[str, list[str]]:
    """Return the names of tools as regular expressions, grouped by the text of the schema of their arguments. Tools with the same schema
    share a grammar rule, because a parser's time grows with the number of rules and not with the number of names."""
    names: dict[str, list[str]] = {}
    for tool in tools:
        names.setdefault(json_text(tool.object_schema), []).append(re.escape(tool.name))
    return names
