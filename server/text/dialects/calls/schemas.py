"""Read what the JSON schema of a tool's parameters says about single values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import unquote

from server.text.grammar import GrammarTooLarge

Schema = Mapping[str, object]
MAX_REFERENCES = 8  # most references that are followed one after another
SHARED = ("$defs", "definitions")  # keywords whose value is an object of named schemas, to which `$ref` elsewhere in the schema can refer
TEXT = frozenset({"string"})  # the types of a schema that only texts match
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
    """Return the schemas of the properties that an object's schema names; empty if it names none."""
    found = resolved(schema, schema).get("properties")
    return {str(name): as_schema(inner) for name, inner in found.items()} if isinstance(found, dict) else {}


def required_of(schema: Schema) -> frozenset[str]:
    """Return the names of the properties that an object must have."""
    found = schema.get("required")
    return frozenset(name for name in cast("list[object]", found) if isinstance(name, str)) if isinstance(found, list) else frozenset()


def as_schema(value: object) -> Schema:
    """Return a schema as an object. A value that is no object, such as `true`, becomes a schema that allows every value; even `false`
    does."""
    return cast("Schema", value) if isinstance(value, dict) else {}


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return the schema that is found by following references to parts of `root`, at most MAX_REFERENCES of them. A reference to no part of
    `root` leads to a schema that allows every value; one that does not begin with `#` is not followed."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = as_schema(part_of(root, reference))
    return schema


def part_of(root: Schema, reference: str) -> Schema | bool | None:
    """Return the schema in `root` to which a reference leads, or None if it leads to none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        match found:
            case dict() if name in found:
                found = cast("Schema", found)[name]
            case list() if name.isdecimal() and len(name) < 6 and int(name) < len(cast("list[object]", found)):
                found = cast("list[object]", found)[int(name)]
            case _:
                return None
    return cast("Schema | bool", found) if isinstance(found, dict | bool) else None


def alone(schema: Schema, root: Schema, *, most: int) -> dict[str, object]:
    """Return a part of `root` as a schema of its own. It has definitions of those parts of `root` to which it refers. Raise GrammarTooLarge
    if these have more than `most` characters: parts may contain one another."""
    names: dict[int, str] = {}  # by the identity of the part, to which references of several spellings may lead: the name of the definition
    unmade: list[Schema | bool] = []

    def rewritten(value: object) -> object:
        """Return a copy of a value in which references lead to the definitions."""
        match value:
            case dict():
                made = {word: rewritten(one) for word, one in cast("Schema", value).items()}
                reference = made.get("$ref")
                part = part_of(root, reference) if isinstance(reference, str) else None
                if part is not None:
                    if id(part) not in names:
                        names[id(part)] = f"part{len(names)}"
                        unmade.append(part)
                    made["$ref"] = f"#/$defs/{names[id(part)]}"
                return made
            case list():
                return [rewritten(one) for one in cast("list[object]", value)]
            case _:
                return value

    made, defined = cast("dict[str, object]", rewritten(schema)), dict[str, object]()
    while unmade:
        part = unmade.pop()
        # without SHARED: these definitions would be copied, although nothing in the copy refers to them
        own = {word: value for word, value in root.items() if word not in SHARED} if part is root else part
        defined[names[id(part)]] = rewritten(own)
        most -= len(json.dumps(defined[names[id(part)]]))
        if most < 0:
            raise GrammarTooLarge
    return {**made, "$defs": defined} if defined else made


def branches(schema: Schema) -> Sequence[Schema]:
    """Return the schemas of `anyOf` or `oneOf`, of which a value must match one; empty if there are none."""
    for word in ("anyOf", "oneOf"):
        if isinstance(found := schema.get(word), list) and found:
            return [as_schema(one) for one in cast("list[object]", found)]
    return ()


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; an empty set if it does not say. `root` is the schema to which its references lead. Each
    schema is read once, because a schema of `anyOf` may refer many times to one that contains it."""
    found: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        one = resolved(pending.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if own := _own_kinds(one):
            found |= own
        elif inner := branches(one):
            pending += inner
        else:
            return frozenset()
    return frozenset(found)


def _own_kinds(schema: Schema) -> frozenset[str]:
    """Return the JSON types that `type`, `enum` or `const` of a schema allow; an empty set if it has none of them."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(map(str, cast("list[object]", named)))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(KINDS.get(type(value), "object") for value in cast("list[object]", values))
    return frozenset([KINDS.get(type(schema["const"]), "object")]) if "const" in schema else frozenset()


def is_text(schema: Schema, root: Schema) -> bool:
    """Return whether only texts match the schema."""
    return kinds(schema, root) == TEXT
