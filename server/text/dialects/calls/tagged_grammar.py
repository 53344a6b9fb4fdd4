"""Build the grammar of calls whose parameters stand between tags. The parameters that the schema names come first, in its order, and then
any others. A value that may be a string is any text up to its closing tag, or one of the schema's values if it lists them (`enum`,
`const`). Any other value is JSON of the property's schema. If the tag says whether a value is text or JSON, both forms may be allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from server.text.dialects.calls.schemas import TEXT, Schema, alone, as_schema, branches, kinds, properties, required_of, resolved
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import MAX_CHARS, GrammarTooLarge, Specials, alternatives, fixed, joined, json_text, literal, up_to_marker

if TYPE_CHECKING:
    from server.text.dialects.calls.tagged_calls import TaggedCalls


def tagged_rules(form: TaggedCalls, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
    """Return the rules between a call's markers; the first is `inside`. Raise GrammarTooLarge if the rules repeat too much of the
    schemas."""
    grouped = by_schema(tools)
    again = f"({joined(fixed(form.line, specials), 'call')})*" if form.listed and several else ""
    before, after = (form.line if text else "" for text in (form.before_name, form.closing))
    inside = joined(fixed(before, specials), "call", again, fixed(after, specials), fixed(form.closing, specials))
    rules = [f"inside: {inside}", f"call: {alternatives('call', len(grouped))}"]
    for index, (schema, names) in enumerate(grouped.items()):
        made = _Parameters(form, specials, index, cast("Schema", json.loads(schema)), most=MAX_CHARS - sum(map(len, rules)))
        head = joined(fixed(form.before_name, specials), f"/({'|'.join(names)})/", fixed(form.after_name + form.line, specials))
        rules += [f"call_{index}: {joined(head, *made.order, fixed(form.after_call, specials))}", *made.rules]
    return rules


class _Parameters:
    """The rules of one schema's parameters, and the order in which a call has them."""

    def __init__(self, form: TaggedCalls, specials: Specials, index: int, root: Schema, *, most: int) -> None:
        """`most`: most characters of the rules."""
        self._form, self._specials, self._root = form, specials, root
        self.rules: list[str] = []
        self.order: list[str] = []  # the rule of each parameter, in order, with `?` or `*` if the parameter may be absent
        self._room = most  # characters of rules that may still be added
        self._kinds_of: dict[int, frozenset[str]] = {}  # by the identity of the schema: `root` keeps all schemas alive, except empty ones
        whole = resolved(root, root)
        required = required_of(whole)
        for number, (name, schema) in enumerate(properties(root).items()):
            rule = f"parameter_{index}_{number}"
            self._add(rule, json.dumps(name), schema)
            self.order.append(rule if name in required else f"{rule}?")
        if (more := whole.get("additionalProperties", True)) is not False:
            rule = f"parameter_{index}_more"
            self._add(rule, r"/[^<>\"\n]+/", as_schema(more))
            self.order.append(f"{rule}*")

    def _add(self, rule: str, key: str, schema: Schema) -> None:
        """Add the rules of a parameter. `key` is the rule of its name."""
        form, specials = self._form, self._specials
        allowed = self._kinds(schema)
        may_be_text, may_be_other = not allowed or "string" in allowed, allowed != TEXT
        glue, written = form.line if form.before_value else "", list[str]()
        for number, (after, says_text) in enumerate(form.after_key.items()):
            if not (says_text is None or (may_be_text if says_text else may_be_other)):
                continue
            value = f"{rule}_value{number}"
            head = joined(fixed(form.before_key, specials), key, fixed(after + glue + form.before_value + form.padding, specials))
            written.append(joined(head, value, fixed(form.line, specials)))
            as_text = may_be_text if says_text is None else says_text
            self._put(self._text(value, schema, mixes=says_text is None) if as_text else self._json(value, schema))
        self.rules.append(f"{rule}: {' | '.join(written)}")

    def _kinds(self, schema: Schema) -> frozenset[str]:
        """Return the JSON types that a schema allows. A part of the schema to which many parameters refer is read once."""
        part = resolved(schema, self._root)
        if id(part) not in self._kinds_of:
            self._kinds_of[id(part)] = kinds(part, self._root)
        return self._kinds_of[id(part)]

    def _put(self, rules: list[str]) -> None:
        """Add the rules of a value. They may repeat parts of the schema to which many values refer. Raise GrammarTooLarge if there is no
        room."""
        self._room -= sum(map(len, rules))
        if self._room < 0:
            raise GrammarTooLarge
        self.rules += rules

    def _text(self, rule: str, schema: Schema, *, mixes: bool) -> list[str]:
        """Return the rules of a value that may be a string: one of the values that the schema lists, or any text up to the next marker if
        it lists none. `mixes`: values of other types are written in the same place, so listed values of other types are allowed, too."""
        values = self._listed(schema)
        if values is None:
            branched = [self._listed(one) for one in branches(resolved(schema, self._root))]
            values = [value for listed in branched for value in listed or ()] if None not in branched else []
        values = [value for value in values if mixes or isinstance(value, str)]
        if values:
            listed = " | ".join(literal(value if isinstance(value, str) else json.dumps(value)) for value in values)
            return [f"{rule}: ({listed}) {self._end()}"]
        return [up_to_marker(rule, self._form.after_value, self._specials)]  # models may leave out the padding, such as after an empty text

    def _listed(self, schema: Schema) -> list[object] | None:
        """Return the values that a schema lists, or None if it lists none."""
        whole = resolved(schema, self._root)
        if isinstance(values := whole.get("enum"), list):
            return cast("list[object]", values)
        return [whole["const"]] if "const" in whole else [None] if whole.get("type") == "null" else None

    def _json(self, rule: str, schema: Schema) -> list[str]:
        """Return the rules of a value in JSON. Each value has a copy of the parts to which its schema refers."""
        text = json_text(alone(schema, self._root, most=self._room))
        return [f"{rule}: {rule}_json {self._end()}", f"{rule}_json: %json {text}"]

    def _end(self) -> str:
        """Return the rule of the text after a value."""
        return fixed(self._form.padding + self._form.after_value, self._specials)
