"""Build pieces of grammars: for JSON, for markers, and for structures within unconstrained text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from server.messages import Constraint, ConstraintKind

Specials = Mapping[str, int]  # ids of markers that are single tokens, by the marker's text
WHITE_SPACE = r"[ ]|\n[ \t]{0,20}"  # white space allowed between the tokens of JSON
KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)  # the formats of strings that llguidance enforces
# Words of a schema whose values are schemas: MAPS have schemas by name, PARTS have one schema or a list of them.
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
PARTS = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf"})
# by word of a schema: values with which the word restricts nothing
WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
}
MAX_CHARS = 1 << 20  # most characters of rules that repeat parts of a schema
MOST_COUNTED = 1 << 20  # items or characters; a larger maximum restricts no answer in practice, and llguidance cannot count so far


class GrammarTooLarge(Exception):
    """Raised if rules repeat so much of a schema that they have more than MAX_CHARS characters."""


def json_text(schema: Mapping[str, object]) -> str:
    """Return the text of a schema, without the words that restrict nothing. The JSON that matches it may have less white space than usual:
    one space, or a line end and its indentation. Small models tend to write endless line ends once they are forced to write JSON."""
    return json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **cast("dict[str, object]", _restricting(schema))})


def _restricting(schema: object) -> object:
    """Return a schema, or a list of schemas, without words that restrict nothing. llguidance refuses some of them, such as a format that it
    does not know; JSON Schema says that an unknown format restricts nothing."""
    match schema:
        case list():
            return [_restricting(one) for one in cast("list[object]", schema)]
        case dict():
            made: dict[str, object] = {}
            for word, value in cast("Mapping[str, object]", schema).items():
                if _is_idle(word, value):
                    continue
                if word in MAPS and isinstance(value, dict):
                    made[word] = {name: _restricting(one) for name, one in cast("Mapping[str, object]", value).items()}
                else:
                    made[word] = _restricting(value) if word in PARTS else value
            return made
        case _:
            return schema


def _is_idle(word: str, value: object) -> bool:
    """Return whether a word of a schema restricts nothing with this value."""
    match word:
        case "format":
            return isinstance(value, str) and value not in KNOWN_FORMATS
        case "maxItems" | "maxLength":
            return isinstance(value, int | float) and value > MOST_COUNTED
        case _:
            return value in WITHOUT_EFFECT.get(word, ())


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
        around = [f"head{triggers.index(one.trigger)}", literal(begin), f"{tag}_inside", literal(one.end)]
        rules += [f"{tag}: {' '.join(filter(None, around))}", f"{tag}_inside: %json {json_text(one.schema)}"]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def or_calls(constraint: Constraint, calls: Constraint, *, before: str = "") -> Constraint:
    """Return a constraint that allows `calls` in place of the answer. `before`: the rule of the text that precedes the answer but not a
    call. The grammar of the calls is nested, so that its rules may have any names."""
    start, _, rules = (constraint.head or "start: answer").partition("\n")
    head = [f"{start.removesuffix('answer')}({before}answer | calls)", rules, f"calls: %lark {{\n{calls.source}\n}}"]
    return msgspec.structs.replace(constraint, head="\n".join(filter(None, head)))


def up_to_marker(rule: str, marker: str, specials: Specials) -> str:
    """Return the rule for any text that ends with the marker."""
    if found := [at for special in specials if (at := marker.find(special)) >= 0]:
        # The text must end with what precedes the token in the marker. Otherwise the token would not belong to a marker.
        begin = re.escape(marker[: min(found)]).replace("/", "\\/").replace("\n", "n")
        return f"{rule}: /(?s:.*){begin}/ {fixed(marker[min(found) :], specials)}"
    return f"{rule}[suffix={json.dumps(marker)}]: /(?s:.*)/"


def fixed(text: str, specials: Specials) -> str:
    """Return the rule for a fixed text, in which markers may be single tokens. Return "" for an empty text."""
    inside = sorted((marker for marker in specials if marker in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, inside))})", text) if inside else [text]
    return joined(*(marker_rule(piece, specials) for piece in pieces if piece))


def joined(*rules: str) -> str:
    """Return the rule for the texts of several rules in a row. An empty rule stands for no text."""
    return " ".join(filter(None, rules))


def tags_in(*texts: str) -> tuple[str, ...]:
    """Return the tags in texts, such as `<tool_call>`. Each tag may be a single token."""
    return tuple(dict.fromkeys(tag for text in texts for tag in re.findall(r"<[^<>\s]+>", text)))


def literal(text: str) -> str:
    """Return the rule for a fixed text without markers. Return "" for an empty text."""
    return json.dumps(text) if text else ""  # the grammar language has no empty literal


def marker_rule(text: str, specials: Specials) -> str:
    """Return the rule for a marker: its token if it is a single token, otherwise its text."""
    token_id = specials.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def alternatives(rule: str, num: int) -> str:
    """Return the expression for one of the rules `rule`_0, `rule`_1, ..., of which there are `num`."""
    return " | ".join(f"{rule}_{index}" for index in range(num))


def spaced(*parts: str) -> str:
    """Return the regular expression for parts with optional white space between them."""
    return f"({WHITE_SPACE})?".join(parts)
