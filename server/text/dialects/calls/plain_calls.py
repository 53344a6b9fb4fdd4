"""Find calls that a model writes as plain JSON although its template says otherwise: in a fenced block, or at the beginning of a line.

    ```json
    {"name": "f", "arguments": {...}}
    ```

Only an object with the name of an offered tool and with arguments is a call; all other text stays content, also the definition of a tool,
which small models repeat from the prompt. Qwen2.5-Coder doubles the outer braces of some calls, because its template shows them so.

No token announces such a call. But the tokens up to the key of its arguments are known for each tool and each usual layout (`PlainCalls`).
From that key on, a grammar holds the call to the tool's schema.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from server.text.dialects.calls.characters import as_json, of_json
from server.text.dialects.calls.json_parser import ARGUMENT_KEYS, NAME_KEYS, SEPARATORS, JsonCallScanner
from server.text.dialects.calls.stream import Steps, Stream
from server.text.dialects.calls.syntax import new_call_id
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import alternatives, spaced
from server.text.parts import CallArguments, CallStart, Content, Part

if TYPE_CHECKING:
    from server.interfaces import Tokenizer

Tokens = tuple[int, ...]

NUM_NAMES = 1024  # names of tools whose tokens are cached
FENCE = "```"
SPACE = " \t\r\n"
LABEL = re.compile(r"[\w+-]{0,20}")
BEGINNING = re.compile(r"\{\s*(\"\w*(\"|$)|$)")  # an object as far as its first key


class PlainCallParser:
    """Finds calls of `tools` that are written as plain JSON. `id_length`: number of letters and digits in a new call's id."""

    def __init__(self, tools: Sequence[ToolSchema], max_calls: int | None = None, id_length: int = 24) -> None:
        self.num_calls = 0
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls = max_calls
        self._id_length = id_length
        self._stream = Stream()
        self._parts: list[Part] = []
        self._space = ""  # white space that is dropped if a call follows
        self._steps: Iterator[None] = self._read()

    @property
    def done(self) -> bool:
        return self.num_calls == self._max_calls

    def push(self, text: str) -> list[Part]:
        self._stream.held += text
        return self._advanced()

    def finish(self) -> list[Part]:
        self._stream.ended = True
        return self._advanced()

    def give_way(self) -> list[Part]:
        """Return the parts that were held back, because a call comes next that another parser has found. Text after that call begins a
        line."""
        parts = self.finish()
        self._stream, self._steps = Stream(), self._read()
        return parts

    def _advanced(self) -> list[Part]:
        """Read the text that has arrived. Return the parts that were found."""
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Iterator[None]:
        """Read the whole answer, line by line. Text after the last allowed call is dropped."""
        stream = self._stream
        while not (self.done or (stream.ended and not stream.held)):
            if not (yield from self._read_calls()):
                self._say(stream.taken)
                stream.forget()
                line_end = yield from stream.pieces_up_to(("\n",), self._say)
                self._say(line_end)
            stream.forget()
            while not (stream.held or stream.ended):
                yield
        if not self.num_calls:
            self._say("", is_last=True)
        while not stream.ended:
            stream.held = ""
            yield

    def _say(self, text: str, *, is_last: bool = False) -> None:
        """Add content, but hold white space at its end back, unless it `is_last`."""
        text = self._space + text
        kept = text if is_last else text.rstrip(SPACE)
        self._space = text[len(kept) :]
        if kept:
            self._parts.append(Content(kept))

    def _read_calls(self) -> Steps[bool]:
        """Read the calls at the beginning of a line, with the fence around them if there is one. Return False if there are none."""
        stream, found = self._stream, self.num_calls
        yield from stream.skip(SPACE)
        is_fenced = bool((yield from stream.find(FENCE)))
        if is_fenced:
            yield from self._skip_label()
        opening = yield from stream.peek()
        if opening not in ("{", "["):
            return False
        while not self.done:
            yield from stream.skip(SEPARATORS)
            if (yield from stream.peek()) != "{" or not (yield from self._read_call()):
                break
        if self.num_calls == found:
            return False
        if rest := stream.taken.lstrip(SEPARATORS):
            self._say(rest)
        elif is_fenced:
            yield from stream.find(FENCE)
        return True

    def _skip_label(self) -> Steps[None]:
        """Read the language of a fenced block, up to the block's text."""
        stream = self._stream
        while (match := LABEL.match(stream.held)) is not None and match.end() == len(stream.held) and not stream.ended:
            yield
        stream.take(0 if match is None else match.end())
        yield from stream.skip(SPACE)

    def _read_call(self) -> Steps[bool]:
        """Read one object. Return False as soon as the object cannot be a call of an offered tool. The text of a call is forgotten, so that
        it does not become content."""
        stream, scanner, written = self._stream, JsonCallScanner(offered=self._tools), ""
        if is_doubled := bool((yield from stream.find("{{"))):
            written = "{"
            scanner.feed(written)
        while not scanner.done:
            written += stream.take(scanner.feed(stream.held))
            if scanner.failed or not BEGINNING.match(written):
                return False
            if not scanner.done:
                if stream.ended:
                    return False
                yield
        call = self._call_of(written)
        if call is None:
            return False
        if is_doubled:
            yield from stream.find("}")
        name, arguments = call
        self._space = ""
        self._parts += [CallStart(self.num_calls, new_call_id(self._id_length), name), CallArguments(self.num_calls, arguments)]
        self.num_calls += 1
        stream.forget()
        return True

    def _call_of(self, written: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a call written as a JSON object. Return None if the text is no JSON object, names no offered
        tool, has arguments that are no object, or is the definition of a tool, whose arguments would be its schema. If the arguments equal
        an empty schema, the object is a definition only if it has a description, too."""
        try:
            whole: object = of_json(written)
        except (ValueError, RecursionError):
            return None
        if not isinstance(whole, dict):
            return None
        found = cast("dict[str, object]", whole)
        inner = found.get("function")
        found = cast("dict[str, object]", inner) if isinstance(inner, dict) else found
        name = next((found[key] for key in NAME_KEYS if key in found), None)
        arguments = next((found[key] for key in ARGUMENT_KEYS if key in found), None)
        if isinstance(arguments, str):
            try:
                arguments = of_json(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        if arguments == self._tools[name].parameters and (arguments or "description" in found):
            return None
        return name, as_json(arguments)


def plain_grammar(tools: Sequence[ToolSchema]) -> str:
    """Return the grammar of a call in plain JSON, including the beginning (see `PlainCalls`) that triggers it."""
    names, keys = by_schema(tools), "|".join(ARGUMENT_KEYS)
    rules = [f"start: {alternatives('call', len(names))}"]
    for index, (schema, same) in enumerate(names.items()):
        head = spaced('[{\\s"]*name"', ":", f'"({"|".join(same)})"', ",", f'"({keys})"', ":", "")
        rules += [f"call_{index}: /{head}/ arguments_{index} /{spaced('', '}')}/", f"arguments_{index}: %json {schema}"]
    return "\n".join(rules)


@dataclass(frozen=True, slots=True)
class _Layout:
    """One way to write a call: its white space, and the name of its key for arguments."""

    first: str  # white space after the opening brace
    colon: str  # white space after a colon
    comma: str  # white space after a comma
    key: str  # key of the arguments

    def head(self) -> str:
        """Return the text before the tool's name."""
        return f'{{{self.first}"name":{self.colon}"'

    def tail(self) -> str:
        """Return the text after the tool's name, up to the end of the key of the arguments."""
        return f'",{self.comma}"{self.key}'


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The tokens with which a call begins, from the token with the first letter of the key `name` to the token with the last letter of the
    arguments' key."""

    before: Tokens  # the tokens before those of the name
    name: Tokens  # the tokens that contain a part of the tool's name
    after: Tokens  # the tokens after those of the name
    ends_name: bool  # a token ends where the name ends

    @property
    def whole(self) -> Tokens:
        return (*self.before, *self.name, *self.after)


class PlainCalls:
    """The beginnings of plain calls in the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._beginnings_of = lru_cache(NUM_NAMES)(self._find)
        self._usual_of = lru_cache(len(LAYOUTS))(lambda layout: self._read("lookup", layout))

    def beginnings(self, names: Sequence[str]) -> tuple[Tokens, ...]:
        """Return the token sequences with which a call of one of the names begins: from its first key to the key of its arguments."""
        return tuple(dict.fromkeys(tokens for name in names for tokens in self._beginnings_of(name)))

    def _find(self, name: str) -> list[Tokens]:
        """Return the beginnings of the calls of tool `name`, in all layouts. Usually the tokens of the name and those around it do not
        depend on each other. Then the name is encoded only once for all layouts with the same white space after a colon, and its tokens are
        put between those that a call of a tool `lookup` has in each layout."""
        found: list[Tokens] = []
        for colon in dict.fromkeys(layout.colon for layout in LAYOUTS):
            layouts = [layout for layout in LAYOUTS if layout.colon == colon]
            one, usual = self._read(name, layouts[0]), [self._usual_of(layout) for layout in layouts]
            if one is not None and one.ends_name and all(usual) and usual[0] is not None and _around(one) == _around(usual[0]):
                found += [(*each.before, *one.name, *each.after) for each in usual if each is not None]
            else:
                found += [each.whole for layout in layouts if (each := self._read(name, layout)) is not None]
        return found

    def _read(self, name: str, layout: _Layout) -> _Beginning | None:
        """Return the tokens of the beginning of a call of tool `name` in a layout, or None if the tokens do not spell the call."""
        head, tail = layout.head(), layout.tail()
        text = f'{head}{name}{tail}":{layout.colon}{{"a":{layout.colon}1}}}}'.encode()
        ids = self._tokenizer.encode(text.decode(), False)
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in ids]
        begin = b"".join(pieces).find(text)  # some tokenizers put a space before a text
        if begin < 0:
            return None
        ends = [end - begin for end in accumulate(map(len, pieces))]
        name_at = len(head.encode())
        name_end = name_at + len(name.encode())
        first = bisect_right(ends, head.index("name"))
        name_first, after, last = bisect_right(ends, name_at), bisect_left(ends, name_end) + 1, bisect_left(ends, name_end + len(tail)) + 1
        return _Beginning(tuple(ids[first:name_first]), tuple(ids[name_first:after]), tuple(ids[after:last]), ends[after - 1] == name_end)


def _around(beginning: _Beginning) -> tuple[Tokens, Tokens]:
    """Return the tokens before and after the tool's name."""
    return beginning.before, beginning.after


LAYOUTS = tuple(
    _Layout(first, colon, comma, key)
    for first, colon, comma in (
        ("", " ", " "),
        ("", "", ""),
        *((line, " ", line) for line in ("\n  ", "\n    ", "\n\t", "\n      ", "\n        ")),
    )
    for key in ARGUMENT_KEYS
)
