"""Calls whose parameters stand between tags, each as text:

    <function=f>
    <parameter=path>
    notes.txt
    </parameter>
    </function>

The text of a parameter is either a string without quotation marks, or JSON. The tag of the parameter says which it is; if it does not, the
tool's schema does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.text.dialects.calls.characters import as_json, of_json
from server.text.dialects.calls.literal_reader import Malformed, read_value
from server.text.dialects.calls.literals import PYTHON
from server.text.dialects.calls.marked import MarkedCallParser
from server.text.dialects.calls.schemas import KINDS, Schema, is_text, kinds, properties
from server.text.dialects.calls.stream import Steps, Stream
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.calls.tagged_grammar import tagged_rules
from server.text.dialects.tool import ToolSchema
from server.text.grammar import Specials, tags_in

NAME = re.compile(r"""[^\s<>{}()"'=]+""")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls(CallSyntax):
    """The syntax of calls whose parameters stand between tags."""

    before_name: str = ""  # text before the tool's name
    after_name: str = ""  # text after the tool's name; empty: the name ends with its line, or at the next tag
    before_key: str  # text before a parameter's name
    # by text after a parameter's name: True: the value is text; False: the value is JSON; None: the schema says which
    after_key: Mapping[str, bool | None]
    before_value: str = ""  # text between `after_key` and the value
    after_value: str  # text after a value
    after_call: str = ""  # text after the last parameter of a call
    line: str = "\n"  # white space that the model writes between tags
    padding: str = ""  # white space around a value, which is no part of it
    tokens: tuple[str, ...] = ()  # single tokens within the tags
    listed: bool = False  # several calls may stand between the markers
    may_lack_opening: bool = False  # models sometimes leave `opening` out

    @property
    def inner_markers(self) -> tuple[str, ...]:
        tags = tags_in(self.before_key, *self.after_key, self.before_value, self.after_value, self.after_call)
        return (*self.tokens, *tags)

    @property
    def signs(self) -> tuple[str, ...]:
        """The markers, and texts that distinguish the syntax from others with the same markers, such as the line end before a value."""
        return (*self.markers, self.before_name, *(after + self.line + self.before_value for after in self.after_key if self.before_value))

    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> TaggedCallParser:
        return TaggedCallParser(self, tools, max_calls)

    def beginnings(self, name: str) -> tuple[str, ...]:
        # The line end is part of the text, because in many vocabularies it is one token with the tag's end.
        return (f"{self.line}{self.before_name}{name}{self.after_name}{self.line}",) if self.after_name else ()

    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        return tagged_rules(self, tools, specials, several=several)


class TaggedCallParser(MarkedCallParser):
    """Reads calls in the syntax of `TaggedCalls`."""

    def __init__(self, syntax: TaggedCalls, tools: Sequence[ToolSchema], max_calls: int | None) -> None:
        super().__init__(syntax, tools, max_calls)
        self._form = syntax
        self.unmarked = syntax.before_name if syntax.may_lack_opening else ""

    def read_call(self) -> Steps[bool]:
        """Read one call, and report it while its parameters arrive. Return False if no call comes next. If the opening marker was not read,
        only a call of an offered tool is a call."""
        form, stream = self._form, self.stream
        if form.before_name and not (yield from stream.find(form.before_name)):
            return False
        ends = (form.after_name,) if form.after_name else ("\n", form.before_key, form.after_call)
        name, end = yield from stream.up_to(*ends)
        if not end or not NAME.fullmatch(name.strip()) or not (self.is_marked or name.strip() in self.tools):
            return False
        self.start(name.strip())
        self.argue("{")
        yield from self._read_parameters(name.strip(), end)
        return True

    def _read_parameters(self, name: str, mark: str) -> Steps[None]:
        """Read the parameters of a call of tool `name`, and report them as JSON. `mark` is the text that ended the name: `after_name`, a
        line end, `before_key`, or a text that ends the call. If the answer ends first, the JSON stays incomplete."""
        form, stream = self._form, self.stream
        ends = tuple(filter(None, (form.after_call, form.closing)))
        root = self.tools[name].parameters or {} if name in self.tools else {}
        known, num_read = properties(root), 0
        while mark not in ends:
            if mark == form.before_key:
                key, after = yield from stream.up_to(*form.after_key)
                if not after:
                    return
                if form.before_value:
                    yield from stream.skip(SPACE)
                    yield from stream.find(form.before_value)
                self.argue((", " if num_read else "") + json.dumps(key, ensure_ascii=False) + ": ")
                yield from self._read_value(known.get(key, {}), root, form.after_key[after])
                num_read += 1
            _, mark = yield from stream.up_to(form.before_key, *ends)
            if not mark:
                return
        self.argue("}")

    def _read_value(self, schema: Schema, root: Schema, says_text: bool | None) -> Steps[None]:
        """Read the value of a parameter, and report it as JSON. `says_text`: the value of `after_key` for the parameter's tag. If the
        answer ends first, report a text as far as it goes, and nothing of any other value."""
        form, stream = self._form, self.stream
        ends = (form.padding + form.after_value, form.after_value)
        yield from stream.find(form.padding)
        if says_text or (says_text is None and is_text(schema, root)):
            self.argue('"')
            end = yield from stream.pieces_up_to(ends, lambda text: self.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
            self.argue('"' if end else "")
        else:
            text, end = yield from stream.up_to(*ends)
            value = json_of(text, schema, root) if says_text is None else json_read(text)
            self.argue(value if end else "")


# --- values ------------------------------------------------------------------------------------------------------------


def json_of(text: str, schema: Schema, root: Schema) -> str:
    """Return the JSON of a value that was written as text. Text that is no value of a type that `schema` allows becomes a JSON string."""
    allowed = kinds(schema, root)
    for value in _readings(text.strip()):
        kind = KINDS[type(value)]
        if kind == "string":
            continue
        if not allowed or kind in allowed or (kind == "integer" and "number" in allowed):
            return as_json(value)
        if isinstance(value, float) and "integer" in allowed and value.is_integer():
            return json.dumps(int(value))
    return json.dumps(text, ensure_ascii=False)


def json_read(text: str) -> str:
    """Return the JSON of a value whose tag says that it is JSON. Text that cannot be read becomes a JSON string."""
    found = _readings(text.strip())
    return as_json(found[0]) if found else json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> list[object]:
    """Return the values of a text: first its value as JSON, then its value as a Python literal, without those that cannot be read."""
    found: list[object] = []
    for read in (of_json, _as_python):
        try:
            found.append(read(text))
        except (ValueError, Malformed, RecursionError):
            continue
    return found


def _as_python(text: str) -> object:
    """Return the value of a Python literal. Raise Malformed if the text is none."""
    stream = Stream()
    stream.held, stream.ended = text + ")", True  # the parenthesis ends the value
    steps = read_value(stream, PYTHON)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            if stream.held != ")":
                raise Malformed(cut=False) from None
            return end.value
