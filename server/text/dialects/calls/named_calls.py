"""Parse and constrain calls that are written as a name, a marker, and arguments in JSON:

<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from server.text.dialects.calls.json_parser import JsonCallScanner
from server.text.dialects.calls.marked import MarkedCallParser
from server.text.dialects.calls.stream import Steps
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import Specials, alternatives, fixed, joined, tags_in

NAME = re.compile(r"""[^\s<>{}()"']+""")
NUMBER = re.compile(r":[0-9]+$")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(CallSyntax):
    """The syntax of calls that are a name, a marker and JSON arguments."""

    call_opening: str  # marker before each call
    before_name: str = ""  # text between `call_opening` and the name
    numbered: bool = False  # `:0`, `:1`, ... follow the name; the call's id is `before_name`, the name and the number
    before_arguments: str  # text after the name
    after_arguments: str = ""  # text between the arguments and `call_closing`
    call_closing: str  # marker after each call
    gap: str = ""  # text between two calls
    between: str | None = None

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return tags_in(self.call_opening, self.before_name, self.before_arguments, self.call_closing)

    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> NamedCallParser:
        return NamedCallParser(self, tools, max_calls)

    def beginnings(self, name: str) -> tuple[str, ...]:
        end = ":" if self.numbered else self.before_arguments  # the number is unknown: the model counts calls of earlier turns, too
        return (f"{self.call_opening}{self.before_name}{name}{end}",)

    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        grouped = by_schema(tools)
        again = f"({fixed(self.gap, specials)} call)*" if several else ""
        number = "/:[0-9]+/" if self.numbered else ""
        rules = [f"inside: {joined('call', again, fixed(self.closing, specials))}", f"call: {alternatives('call', len(grouped))}"]
        for index, (schema, names) in enumerate(grouped.items()):
            head = joined(fixed(self.call_opening + self.before_name, specials), f"/({'|'.join(names)})/", number)
            tail = joined(
                fixed(self.before_arguments, specials), f"arguments_{index}", fixed(self.after_arguments + self.call_closing, specials)
            )
            rules += [f"call_{index}: {head} {tail}", f"arguments_{index}: %json {schema}"]
        return rules


class NamedCallParser(MarkedCallParser):
    """Reads calls in the syntax of `NamedCalls`."""

    def __init__(self, syntax: NamedCalls, tools: Sequence[ToolSchema], max_calls: int | None) -> None:
        super().__init__(syntax, tools, max_calls)
        self._form = syntax

    def read_call(self) -> Steps[bool]:
        """Read one call, and report it while its arguments arrive. Return False if no call comes next, or if its arguments are no
        object."""
        form, stream = self._form, self.stream
        if not (yield from stream.find(form.call_opening)):
            return False
        written, found = yield from stream.up_to(form.before_arguments)
        call_id = written.strip() if form.numbered else ""
        name = written.strip().removeprefix(form.before_name)
        name = NUMBER.sub("", name) if form.numbered else name
        if not found or not NAME.fullmatch(name):
            return False
        yield from stream.skip(SPACE)
        if (yield from stream.peek()) != "{":
            return False
        if form.numbered and call_id in self.ids:  # the template writes this id again in later prompts, so a new id gets the same form
            others = (f"{form.before_name}{name}:{number}" for number in count(self.num_calls))
            call_id = next(other for other in others if other not in self.ids)
        self.start(name, call_id)
        yield from self._read_arguments(JsonCallScanner(name))
        yield from stream.up_to(form.call_closing)
        return True

    def _read_arguments(self, scanner: JsonCallScanner) -> Steps[None]:
        """Read the arguments and report them, up to their end or the end of the text."""
        stream = self.stream
        while not scanner.done:
            stream.take(scanner.feed(stream.held))
            self.argue(scanner.take_arguments())
            if scanner.done or stream.ended:
                return
            yield
