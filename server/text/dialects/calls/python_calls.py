"""Parse and constrain calls that are written in Python: `[f(a="x", b=1), g()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from server.text.dialects.calls.characters import as_json
from server.text.dialects.calls.literal_reader import Malformed, read_fields
from server.text.dialects.calls.literals import PYTHON, LiteralRules
from server.text.dialects.calls.marked import MarkedCallParser
from server.text.dialects.calls.schemas import Schema, properties, required_of, resolved
from server.text.dialects.calls.stream import Steps
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import Specials, alternatives, literal, marker_rule

NAME = re.compile(r"[A-Za-z_][\w.\-]*")
MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(CallSyntax):
    """The syntax of calls that are written in Python, in a list."""

    list_opening: str = "["
    list_closing: str = "]"
    comma: str = ", "  # text between two calls
    between: str | None = None

    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> PythonCallParser:
        return PythonCallParser(self, tools, max_calls)

    def beginnings(self, name: str) -> tuple[str, ...]:
        return (f"{self.list_opening}{name}(",)

    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        grouped = by_schema(tools)
        again = f"({literal(self.comma)} call)*" if several else ""
        around = [literal(self.list_opening), "call", again, literal(self.list_closing)]
        around.append("" if self.bare else marker_rule(self.closing, specials))
        rules = [f"inside: {' '.join(filter(None, around))}", f"call: {alternatives('call', len(grouped))}"]
        for index, (schema, names) in enumerate(grouped.items()):
            root = cast("Schema", json.loads(schema))
            values = LiteralRules(PYTHON, specials, f"value_{index}", root)
            inner = self._arguments(root, values)
            call = " ".join(filter(None, [f"/({'|'.join(names)})\\(/", inner, '")"']))
            rules += [f"call_{index}: {call}", *values.rules]
        return rules

    @staticmethod
    def _arguments(root: Schema, values: LiteralRules) -> str:
        """Return the expression for the arguments of a call, which match the schema `root`. If the schema names no properties, any
        arguments match, or none if it forbids further properties."""
        named, whole = properties(root), resolved(root, root)
        if named:
            return values.fields(named, required_of(whole), {name: literal(f"{name}=") for name in named})
        if whole.get("additionalProperties") is False:
            return ""
        item = f"/[A-Za-z_][A-Za-z0-9_]*=/ {values.value({})}"
        return f'({item} (", " {item})*)?'


class PythonCallParser(MarkedCallParser):
    """Reads calls in Python."""

    separators = " \t\r\n,;[]"

    def __init__(self, syntax: PythonCalls, tools: Sequence[ToolSchema], max_calls: int | None) -> None:
        super().__init__(syntax, tools, max_calls)
        self._is_bare = syntax.bare

    def read_call(self) -> Steps[bool]:
        """Read one call, and report it. If the call was cut off, report only its name, and return True. Return False if no call comes next,
        or if its arguments are malformed. If the syntax is `bare`, only a call of an offered tool is a call."""
        name = yield from self._read_name()
        if not name or (self._is_bare and name not in self.tools):
            return False
        try:
            arguments = yield from read_fields(self.stream, PYTHON, "=", ")")
        except Malformed as error:
            if error.cut:
                self.start(name)
            return error.cut
        self.start(name)
        self.argue(as_json(arguments))
        return True

    def _read_name(self) -> Steps[str]:
        """Read a name and the parenthesis after it. Return an empty text if something else comes next."""
        stream = self.stream
        while True:
            match = NAME.match(stream.held)
            length = 0 if match is None else match.end()
            if (length < len(stream.held)) or stream.ended or length > MAX_NAME:
                break
            yield
        if not length or stream.held[length : length + 1] != "(":
            return ""
        return stream.take(length + 1)[:-1]
