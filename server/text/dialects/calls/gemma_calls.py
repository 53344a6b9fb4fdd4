"""Parse and constrain calls as Gemma writes them: `call:f{path:<|"|>notes.txt<|"|>,count:3}`. Strings stand between markers without any
escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from server.text.dialects.calls.characters import as_json
from server.text.dialects.calls.literal_reader import Malformed, read_fields
from server.text.dialects.calls.literals import LiteralRules, LiteralStyle
from server.text.dialects.calls.marked import MarkedCallParser
from server.text.dialects.calls.schemas import Schema
from server.text.dialects.calls.stream import Steps
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import Specials, alternatives, marker_rule

NAME = re.compile(r"""[^\s<>{}()"']+""")
BEFORE_NAME = "call:"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(CallSyntax):
    """The syntax of Gemma's calls."""

    quote: str  # marker before and after a string
    closing: str = ""

    @property
    def style(self) -> LiteralStyle:
        return LiteralStyle("true", "false", "null", self.quote, bare_keys=True, comma=",", colon=":")

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return (self.quote,)

    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> GemmaCallParser:
        return GemmaCallParser(self, tools, max_calls)

    def beginnings(self, name: str) -> tuple[str, ...]:
        return (f"{BEFORE_NAME}{name}{{",)

    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        grouped = by_schema(tools)
        rules = [f"inside: call {marker_rule(self.closing, specials)}", f"call: {alternatives('call', len(grouped))}"]
        for index, (schema, names) in enumerate(grouped.items()):
            root = cast("Schema", json.loads(schema))
            values = LiteralRules(self.style, specials, f"value_{index}", root)
            rules += [f"call_{index}: /{BEFORE_NAME}({'|'.join(names)})/ {values.value(root)}", *values.rules]
        return rules


class GemmaCallParser(MarkedCallParser):
    """Reads calls in Gemma's syntax."""

    def __init__(self, syntax: GemmaCalls, tools: Sequence[ToolSchema], max_calls: int | None) -> None:
        super().__init__(syntax, tools, max_calls)
        self._style = syntax.style

    def read_call(self) -> Steps[bool]:
        """Read one call, and report it. If the call was cut off, report only its name, and return True. Return False if no call comes next,
        or if its arguments are malformed."""
        if not (yield from self.stream.find(BEFORE_NAME)):
            return False
        name, found = yield from self.stream.up_to("{")
        if not found or not NAME.fullmatch(name.strip()):
            return False
        try:
            arguments = yield from read_fields(self.stream, self._style, ":", "}")
        except Malformed as error:
            if error.cut:
                self.start(name.strip())
            return error.cut
        self.start(name.strip())
        self.argue(as_json(arguments))
        return True
