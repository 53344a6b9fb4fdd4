"""Build grammars of values that are not written as JSON: Python's literals, and Gemma's. The schema says which values are allowed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from server.text.dialects.calls.schemas import KINDS, Schema, as_schema, branches, kinds, required_of, resolved
from server.text.grammar import Specials, joined, json_text, literal, marker_rule, up_to_marker

INTEGER = "/-?(0|[1-9][0-9]*)/"
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LIMITS = {"integer": BOUNDS, "number": BOUNDS, "string": ("minLength", "maxLength", "pattern", "format")}  # words that restrict a type
ANY = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class LiteralStyle:
    """How a model writes values."""

    true: str
    false: str
    null: str
    quote: str = ""  # marker around strings; empty: double quotes with escapes, as in JSON
    bare_keys: bool = False  # keys of objects have no quotes
    comma: str = ", "
    colon: str = ": "

    def written(self, value: object) -> str:
        """Return a value as a model writes it."""
        match value:
            case None:
                return self.null
            case bool():
                return self.true if value else self.false
            case str():
                return f"{self.quote}{value}{self.quote}" if self.quote else json.dumps(value, ensure_ascii=False)
            case list():
                return f"[{self.comma.join(map(self.written, cast('list[object]', value)))}]"
            case dict():
                items = cast("Mapping[str, object]", value).items()
                return f"{{{self.comma.join(f'{self.key(key)}{self.colon}{self.written(one)}' for key, one in items)}}}"
            case _:
                return json.dumps(value)

    def key(self, name: str) -> str:
        """Return the key of an object as a model writes it."""
        return name if self.bare_keys else self.written(name)


PYTHON = LiteralStyle("True", "False", "None")


class LiteralRules:
    """The grammar rules of values that match schemas. The names of the rules begin with `prefix`. References in schemas lead to parts of
    `root`."""

    def __init__(self, style: LiteralStyle, specials: Specials, prefix: str, root: Schema) -> None:
        self._style, self._specials, self._prefix, self._root = style, specials, prefix, root
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # names of rules, by the text of the schema
        self._by_id: dict[int, str] = {}  # names of rules, by the identity of the schema: `root` keeps all schemas alive, except empty ones
        self._unmade: deque[tuple[str, Schema]] = deque()  # rules that are named and not made yet
        self._num_lists = 0  # number of lists of fields

    @property
    def rules(self) -> list[str]:
        """The rules of all values for which `value` has returned a name, and of the values in these. Read this last: it makes the rules
        that are not made yet."""
        while self._unmade:  # not by recursion, because schemas may refer to one another in a long chain
            name, schema = self._unmade.popleft()
            self._rules.append(f"{name}: {self._expression(schema)}")
        return self._rules

    def value(self, schema: Schema) -> str:
        """Return the name of the rule for values that match a schema. The rule is then among `rules`. All references to one part of `root`
        share the rule of that part."""
        found = resolved(schema, self._root)
        if id(found) not in self._by_id:
            text = json.dumps(found, sort_keys=True)
            if text not in self._names:
                self._names[text] = name = f"{self._prefix}_{len(self._names)}"
                self._unmade.append((name, found))
            self._by_id[id(found)] = self._names[text]
        return self._by_id[id(found)]

    def fields(self, named: Mapping[str, Schema], required: Collection[str], before: Mapping[str, str]) -> str:
        """Return the expression for named values in this order, separated by commas, and add the rules that it needs. Values that are not
        `required` may be absent. `before` has the rule of the text before each value. The expression is empty if there are no values."""
        comma, rest = literal(self._style.comma), ""
        found: list[str] = []
        self._num_lists += 1
        for position, (name, schema) in reversed([*enumerate(named.items())]):
            item = f"{before[name]} {self.value(schema)}"
            is_required = name in required
            if is_required:
                found.clear()  # no later value can come first
            found.append(joined(item, rest))
            if position:
                further = f"{self._prefix}_list{self._num_lists}_{position}"  # name of the rule for what follows an earlier value
                self._rules.append(f"{further}: {joined(f'{comma} {item}' if is_required else f'({comma} {item})?', rest)}")
                rest = further
        if not found:
            return ""
        return f"({' | '.join(reversed(found))})" + ("" if any(name in required for name in named) else "?")

    def _expression(self, schema: Schema) -> str:
        """Return the expression for values that match a schema, which is no reference."""
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        if values:
            return " | ".join(self._constant(value) for value in cast("list[object]", values))
        if inner := branches(schema):
            return " | ".join(self.value(one) for one in inner)
        found = kinds(schema, self._root)
        allowed = found if found and found.issubset(KINDS.values()) else ANY  # for a type that JSON lacks, allow all types
        return " | ".join(self._of_kind(kind, schema) for kind in sorted(allowed))

    def _constant(self, value: object) -> str:
        """Return the expression for one value."""
        if isinstance(value, str) and self._style.quote:
            quote = marker_rule(self._style.quote, self._specials)
            return " ".join(filter(None, [quote, literal(value), quote]))
        return literal(self._style.written(value))

    def _of_kind(self, kind: str, schema: Schema) -> str:
        """Return the expression for the values of one JSON type that match a schema."""
        style = self._style
        limits = {} if kind == "string" and style.quote else {word: schema[word] for word in LIMITS.get(kind, ()) if word in schema}
        if limits:  # such values are written as in JSON, so llguidance can enforce their limits
            name = f"{self._prefix}_limited{len(self._rules)}"
            self._rules.append(f"{name}: %json {json_text({'type': kind, **limits})}")
            return name
        match kind:
            case "string":
                return self._text()
            case "boolean":
                return f"{literal(style.true)} | {literal(style.false)}"
            case "null":
                return literal(style.null)
            case "integer":
                return INTEGER
            case "number":
                return NUMBER
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema)

    def _array(self, schema: Schema) -> str:
        """Return the expression for the arrays that match a schema."""
        item, comma = self.value(as_schema(schema.get("items"))), literal(self._style.comma)
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0 and not least:
            return '"[" "]"'
        again = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 and least <= 1 else f"{item} {again}"  # llguidance refuses a repetition that ends at 0
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _text(self) -> str:
        """Return the expression for any string."""
        if not self._style.quote:
            return r'/"([^"\\\n]|\\["\\\/bfnrtu])*"/'
        if "text" not in self._names:
            self._names["text"] = name = f"{self._prefix}_text"
            self._rules.append(up_to_marker(name, self._style.quote, self._specials))
        return f"{marker_rule(self._style.quote, self._specials)} {self._names['text']}"

    def _object(self, schema: Schema) -> str:
        """Return the expression for the objects that match a schema."""
        style = self._style
        named = {str(name): as_schema(inner) for name, inner in as_schema(schema.get("properties")).items()}
        if not named and schema.get("additionalProperties") is False:
            return '"{" "}"'
        if not named:
            key = r"/[^\s:{}\[\],<>\"']+/" if style.bare_keys else self._text()
            item = f"{key} {literal(style.colon)} {self.value(as_schema(schema.get('additionalProperties')))}"
            return f'"{{" ({item} ({literal(style.comma)} {item})*)? "}}"'
        before = {name: literal(style.key(name) + style.colon) for name in named}
        return " ".join(filter(None, ['"{"', self.fields(named, required_of(schema), before), '"}"']))


def _count(schema: Schema, word: str) -> int | None:
    """Return the number of items that a word of a schema names, or None if it names none."""
    found = schema.get(word)
    return int(found) if isinstance(found, int | float) and found >= 0 else None
