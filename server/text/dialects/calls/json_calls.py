"""Calls written as JSON objects, `{"name": "f", "arguments": {...}}`, or as a name, a marker and JSON arguments, `f[ARGS]{...}`. The call's
id may stand between name and arguments: `f[CALL_ID]aB3dE6gH9[ARGS]{...}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.text.dialects.calls.json_parser import JsonCallParser
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import Specials, alternatives, marker_rule, spaced


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(CallSyntax):
    """The syntax of calls that are JSON objects."""

    number_key: str = ""  # first key of a call, whose value is the call's number in the answer; empty: calls have no number
    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = False  # the calls between the markers are a JSON list
    arguments_marker: str = ""  # if set: a call may also be a function's name, this marker, and the arguments
    id_marker: str = ""  # if set: this marker and the call's id may come before `arguments_marker`

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return (self.arguments_marker, self.id_marker)

    @property
    def signs(self) -> tuple[str, ...]:
        return (*self.markers, f'"{self.name_key}"', f'"{self.arguments_key}"')

    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> JsonCallParser:
        return JsonCallParser(self, frozenset(tool.name for tool in tools), max_calls)

    def beginnings(self, name: str) -> tuple[str, ...]:
        """Return the beginnings of a call that is a JSON object. If the calls are a list, the bracket that opens the list comes first, and
        a call may also begin with its name and a marker. Return none if the call's number comes before the name."""
        if self.number_key:
            return ()
        head = f'{{"{self.name_key}": "{name}", "{self.arguments_key}":'
        if self.listed:
            return f" [{head}", f"[{head}", *(name + marker for marker in self.inner_markers if marker)
        return (f"\n{head}",)

    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        """Return the rules: `call` for calls that are objects, and `short` for calls that are a name before a marker, if the syntax has
        such a marker."""
        names = by_schema(tools)
        rules = [f"inside: {self._around_calls(specials, several=several)}", f"call: {alternatives('call', len(names))}"]
        if self.arguments_marker:
            rules.append(f"short: {alternatives('short', len(names))}")
        call_id = f"({marker_rule(self.id_marker, specials)} /[A-Za-z0-9]{{{self.id_length}}}/)? " if self.id_marker else ""
        for index, (schema, same) in enumerate(names.items()):
            name, arguments = f"({'|'.join(same)})", f"arguments_{index}"
            number = [f'"{self.number_key}"', ":", '"[0-9]+"', ","] if self.number_key else []
            head = spaced("\\{", *number, f'"{self.name_key}"', ":", f'"{name}"', ",", f'"{self.arguments_key}"', ":", "")
            rules += [f"call_{index}: /{head}/ {arguments} /{spaced('', '}')}/", f"{arguments}: %json {schema}"]
            if self.arguments_marker:
                rules.append(f"short_{index}: /{name}/ {call_id}{marker_rule(self.arguments_marker, specials)}? {arguments}")
        return rules

    def _around_calls(self, specials: Specials, *, several: bool) -> str:
        """Return the grammar rule of what follows the opening marker: the calls, and the text around them."""
        closing = f" {marker_rule(self.closing, specials)}" if self.closing and not self.bare else ""
        if self.listed:
            gap = f"/{spaced('', '')}/"
            more = f' ("," {gap} call)*' if several else ""
            listed = f'" "? "[" {gap} call{more} {gap} "]"{closing}'
            return f"{listed} | short{closing}" if self.arguments_marker else listed
        return f'"\\n" call "\\n"{closing}' if closing else "call"
