"""Constraints for answers: forced tool calls, structures within unconstrained text, and an optional think block before them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from server.messages import Constraint, ConstraintKind
from server.text.reasoning import CLOSE, OPEN
from server.text.tools import ToolFormat

Specials = Mapping[str, int]  # ids of markers that are single tokens, by the marker's text
COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties", "enum", "const"})
WHITE_SPACE = r"[ ]|\n[ \t]{0,20}"  # white space allowed between the tokens of JSON


@dataclass(frozen=True, slots=True)
class ToolSchema:
    name: str
    parameters: Mapping[str, object] | None  # None: any JSON object


def json_text(schema: Mapping[str, object]) -> str:
    """Return a schema that allows less white space than JSON does: one space, or a line end and its indentation. Small models tend to write
    endless line ends once they are forced to write JSON."""
    return json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema})


def closed(schema: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of a call's arguments, changed to refuse properties that it does not name: `additionalProperties` becomes false
    where it is absent, also in nested objects that name properties. An object composed of several schemas is not changed, because each
    schema would refuse the properties of the others."""
    given, required = schema.get("properties", {}), schema.get("required", [])
    if COMPOSED & schema.keys() or not (isinstance(given, dict) and isinstance(required, list)):
        return {**schema}
    properties = cast("dict[str, object]", given)
    made: dict[str, object] = {**schema, "properties": {name: _closed_within(inner) for name, inner in properties.items()}}
    if set(map(str, required)) <= properties.keys():  # an object must not refuse a property that it requires
        made.setdefault("additionalProperties", False)
    return made


def _closed_within(schema: object) -> object:
    match schema:
        case {"properties": dict()}:
            return closed(cast("Mapping[str, object]", schema))
        case {"items": dict() as items}:
            return {**cast("Mapping[str, object]", schema), "items": _closed_within(items)}
        case _:
            return schema


def forced_calls(form: ToolFormat, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> Constraint:
    """Return the constraint for one call of any of `tools`, or for one or more calls if `several`, in the format `form`."""
    one = "inside" if form.bare else f"{marker_rule(form.opening, specials)} inside"
    again = f" (between {one})*" if several else ""
    rules = [f"start: {one}{again}", f"between: {form.between}"]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join([*rules, *_inside(form, tools, specials, several=several)]))


def calls_behind_marker(form: ToolFormat, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> str:
    """Return the grammar of a call of one of `tools` after its opening marker."""
    return "\n".join(["start: inside", *_inside(form, tools, specials, several=several)])


def beginnings(form: ToolFormat, name: str) -> tuple[str, ...]:
    """Return the texts with which a call of tool `name` may begin, from after the marker up to the arguments."""
    head = f'{{"name": "{name}", "{form.arguments_key}":'
    if form.arguments_marker:
        return f" [{head}", f"[{head}", name + form.arguments_marker
    return (f"\n{head}",)


def by_schema(tools: Sequence[ToolSchema]) -> dict[str, list[str]]:
    """Return the names of tools as regular expressions, grouped by the text of the schema of their arguments."""
    names: dict[str, list[str]] = {}
    for tool in tools:
        schema = {} if tool.parameters is None else closed(tool.parameters)
        names.setdefault(json_text({"type": "object", **schema}), []).append(re.escape(tool.name))
    return names


def _inside(form: ToolFormat, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
    """Return the grammar rules between a call's markers. Tools with the same schema share a rule, because the parser's time grows with
    the number of rules and not with the number of names."""
    names = by_schema(tools)
    rules = [f"inside: {_around_calls(form, specials, several=several)}", f"call: {_alternatives('call', len(names))}"]
    if form.arguments_marker:
        rules.append(f"short: {_alternatives('short', len(names))}")
    for index, (schema, same) in enumerate(names.items()):
        name, arguments = f"({'|'.join(same)})", f"arguments_{index}"
        head = _spaced("\\{", '"name"', ":", f'"{name}"', ",", f'"{form.arguments_key}"', ":", "")
        rules += [f"call_{index}: /{head}/ {arguments} /{_spaced('', '}')}/", f"{arguments}: %json {schema}"]
        if form.arguments_marker:
            rules.append(f"short_{index}: /{name}/ {marker_rule(form.arguments_marker, specials)}? {arguments}")
    return rules


def _around_calls(form: ToolFormat, specials: Specials, *, several: bool) -> str:
    if form.closing:
        return f'"\\n" call "\\n" {marker_rule(form.closing, specials)}'
    if form.arguments_marker:
        more = ' ("," " "? call)*' if several else ""
        return f'" "? "[" call{more} "]" | short'
    return "call"


def _alternatives(rule: str, num: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(num))


def _spaced(*parts: str) -> str:
    return f"({WHITE_SPACE})?".join(parts)


@dataclass(frozen=True, slots=True)
class Structure:
    """A constrained section of an otherwise unconstrained answer: after `trigger` must come the rest of `begin`, JSON of the schema, and
    `end`."""

    trigger: str  # a prefix of `begin`
    begin: str
    schema: Mapping[str, object]
    end: str


def structured(structures: Sequence[Structure]) -> Constraint:
    """Return the constraint for unconstrained text in which every trigger must continue as one of the structures."""
    triggers = list(dict.fromkeys(structure.trigger for structure in structures))
    tags = [f"tag{index}" for index in range(len(structures))]
    rules = [f"start: ({' | '.join(tags)})* rest", "rest: TEXT", "TEXT: /(?s:.*)/"]
    # A lazy lexeme ends where its trigger ends, and wins over longer text. So no trigger can be written without its structure.
    rules += [f"head{index}[lazy]: TEXT {json.dumps(trigger)}" for index, trigger in enumerate(triggers)]
    for tag, one in zip(tags, structures, strict=True):
        begin = one.begin.removeprefix(one.trigger)
        around = [f"head{triggers.index(one.trigger)}", _literal(begin), f"{tag}_inside", _literal(one.end)]
        rules += [f"{tag}: {' '.join(filter(None, around))}", f"{tag}_inside: %json {json_text(one.schema)}"]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def behind_thoughts(constraint: Constraint, specials: Specials, *, open_already: bool) -> Constraint:
    """Return `constraint` preceded by a think block, which the model may write or has already opened."""
    start = "thought gap" if open_already else f"({marker_rule(OPEN, specials)} thought gap)?"
    head = "\n".join([f"start: {start} answer", up_to_marker("thought", CLOSE, specials), "gap: /\\n*/"])
    return msgspec.structs.replace(constraint, head=head)


def up_to_marker(rule: str, marker: str, specials: Specials) -> str:
    """Return the rule for any text that ends with the marker."""
    if marker in specials:
        return f"{rule}: /(?s:.*)/ {marker_rule(marker, specials)}"
    return f"{rule}[suffix={json.dumps(marker)}]: /(?s:.*)/"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""  # the grammar language has no empty literal


def marker_rule(text: str, specials: Specials) -> str:
    token_id = specials.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
