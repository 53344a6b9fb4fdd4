"""Find the calls in an answer that are JSON objects with a name and arguments, alone or in a list, with or without markers.

However the stream is cut into pieces, the parts are the same; only the arguments of a call may come in different pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from server.text.detokenize import overlap
from server.text.dialects.calls.characters import StringEscaper, whole_characters
from server.text.dialects.calls.syntax import own_id
from server.text.parts import CallArguments, CallStart, Content, Part

if TYPE_CHECKING:
    from server.text.dialects.calls.json_calls import JsonCalls

SEPARATORS = " \t\r\n,;[]"
SHORT = re.compile(r"[^\s\[{]+\s*([\[{]|$)")  # the beginning of a call such as `f[ARGS]{...}`, up to the bracket or brace after the name
NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
WRAPPER_KEYS = ("type", "id", "function")  # keys of a call in OpenAI's shape
KEYS = frozenset((*NAME_KEYS, *ARGUMENT_KEYS, *WRAPPER_KEYS))
NULL = "null"


class _State(Enum):
    """Where in an answer the parser is."""

    START = auto()  # only white space so far; a bare call may still begin
    TEXT = auto()
    BETWEEN = auto()  # where a call may come next: after an opening marker, at the start of a bare call, or after a call
    CALL = auto()
    DONE = auto()  # the allowed number of calls has been made


class JsonCallParser:
    """Finds calls in the syntax `form`. If no marker announces an object, it is a call only if it names one of the tools `names`."""

    def __init__(self, form: JsonCalls, names: frozenset[str], max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._state = _State.START if form.bare else _State.TEXT
        self._held = ""  # text that cannot be assigned to a part yet
        self._raw = ""  # text read since the last content; it becomes content if it is no call
        self._marked = False  # a marker announced the call, so it is a call even if its name is unknown
        self._scanner = JsonCallScanner()
        self._call_id = ""  # the id that the model has written for the scanned call
        self._ids: set[str] = set()  # ids of all calls
        self._started = False  # CallStart of the scanned call has been sent

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the text that was held back. A call that was cut off ends where the text ends. Behind a marker that only calls have
        (`CallSyntax.announces`), the beginning of a call is no content, even if its name was cut off."""
        held, self._held = self._held, ""
        is_announced = self._marked and self._form.announces
        match self._state:
            case _State.START | _State.TEXT:
                text = held
            case _State.CALL if not (self._started or is_announced):
                text = self._raw
            case _State.BETWEEN if not (self.num_calls or is_announced):
                text = self._raw + held
            case _:
                text = ""
        if self.num_calls and self._form.opening.startswith(text.strip()):
            text = ""  # white space after the last call, or the beginning of a marker that was cut off
        return [Content(text)] if text else []

    def _advance(self, parts: list[Part]) -> bool:
        """Parse until the next change of state. Return False if more text is needed."""
        if not self._held:
            return False
        match self._state:
            case _State.START:
                return self._at_start()
            case _State.TEXT:
                return self._in_text(parts)
            case _State.BETWEEN:
                return self._between(parts)
            case _State.CALL:
                return self._in_call(parts)
            case _State.DONE:
                self._held = ""
                return False

    def _at_start(self) -> bool:
        """Find out whether the answer begins with a bare call. Return False if more text is needed, like the methods below."""
        stripped = self._held.lstrip()
        if not stripped:
            return False
        self._state = _State.BETWEEN if stripped[0] in "{[" else _State.TEXT
        return True

    def _in_text(self, parts: list[Part]) -> bool:
        """Pass on content up to an opening marker."""
        marker = self._form.opening
        text, found, rest = self._held.partition(marker) if marker else (self._held, "", "")
        if found:
            self._state = _State.BETWEEN
            self._marked = True
            self._raw = text[len(text.rstrip()) :] + found
            self._held = rest
            text = text.rstrip()
        else:
            keep = len(text) - overlap(text, marker)
            keep = len(text[:keep].rstrip())  # hold white space back: it is dropped if a call follows
            text, self._held = text[:keep], text[keep:]
        if text:
            parts.append(Content(text))
        return bool(found)

    def _between(self, parts: list[Part]) -> bool:
        """Read markers, separators and the beginning of a call. Any other text ends the calls."""
        form, held = self._form, self._held
        for marker in form.markers:
            if held.startswith(marker):
                self._read(len(marker))
                if marker == form.closing:
                    self._state = _State.TEXT
                    self._raw = ""
                else:
                    self._marked = True
                return True
            if marker.startswith(held):
                return False
        if held[0] in SEPARATORS:
            self._read(1)
            return True
        if held[0] == "{":
            self._begin(JsonCallScanner(offered=None if self._marked else self._names, head_ends=ARGUMENT_KEYS))
            return True
        if form.arguments_marker and self._marked and SHORT.match(held):
            head, brace, _ = held.partition("{")
            if not brace:
                return False
            self._read(len(head))
            name, _, rest = head.partition("[")
            self._begin(JsonCallScanner(name.strip()), self._id_in(f"[{rest}"))
            return True
        self._give_back(parts)
        return True

    def _id_in(self, text: str) -> str:
        """Return the call's id that the model has written before the arguments, or "" if there is no id of the form that templates
        accept."""
        marker = self._form.id_marker
        found = text.removeprefix(marker).partition("[")[0].strip() if marker and text.startswith(marker) else ""
        return found if found.isascii() and found.isalnum() and len(found) == self._form.id_length else ""

    def _begin(self, scanner: JsonCallScanner, call_id: str = "") -> None:
        """Begin to read a call. `call_id`: the id that the model has written for the call; "": none."""
        self._scanner = scanner
        self._call_id = call_id
        self._started = False
        self._state = _State.CALL

    def _in_call(self, parts: list[Part]) -> bool:
        """Read the call further, and pass on its name and arguments. Text that turns out to be no call becomes content."""
        scanner = self._scanner
        self._read(scanner.feed(self._held))
        if not self._started and scanner.name is not None and (scanner.done or not scanner.in_head):
            self._started = True
            parts.append(CallStart(self.num_calls, own_id(self._call_id, self._ids, self._form.id_length), scanner.name))
        if self._started and (arguments := scanner.take_arguments()):
            parts.append(CallArguments(self.num_calls, arguments))
        if not (scanner.done or scanner.failed):
            return False
        if not self._started:
            self._give_back(parts)
            return True
        self.num_calls += 1
        self._raw = ""
        self._state = _State.DONE if self.num_calls == self._max_calls else _State.BETWEEN
        return True

    def _read(self, length: int) -> None:
        """Move text from `_held` to `_raw`."""
        self._raw += self._held[:length]
        self._held = self._held[length:]

    def _give_back(self, parts: list[Part]) -> None:
        """Turn the text read so far into content, because it is no call. After a call, the separators at the text's beginning are dropped.
        From now on, only a marker can begin a call."""
        text, self._raw = self._raw, ""
        self._state = _State.TEXT
        if text := text.lstrip(SEPARATORS) if self.num_calls else text:
            parts.append(Content(text))


class JsonCallScanner:
    """Reads one call's object character by character, and escapes control characters in its strings. If `name` is given, the whole object
    is the arguments of a call with this name. If no marker has announced a call, `offered` has the names of the tools: the object is no
    call if it has another name, or if its head has a key outside KEYS. The head ends once the name and one of the keys `head_ends` have
    come."""

    def __init__(self, name: str | None = None, *, offered: Container[str] | None = None, head_ends: Sequence[str] = NAME_KEYS) -> None:
        self.name = name  # None: it was not read yet
        self.done = False  # the object is complete
        self.failed = False  # the text is no call
        self._bare_arguments = name is not None  # the whole object is the arguments
        self._offered = offered
        self._head_ends = head_ends
        self._any_end = False  # one of the keys `head_ends` has come
        self._depth = 0  # number of open braces and brackets
        self._strings = StringEscaper()
        self._at_key = True  # at depth 1: True if a key comes next, False if a value does
        self._key = ""
        self._span = ""  # the key or value being read
        self._arguments = ""  # text of the arguments that was read but not returned yet
        self._any_arguments = False  # text of the arguments was returned

    @property
    def in_head(self) -> bool:
        """Whether no marker has announced the call, and its head goes on: the name is missing, or all of the keys `head_ends` are."""
        return self._offered is not None and (self.name is None or not self._any_end)

    def feed(self, text: str) -> int:
        """Read characters of the object. Return how many were read: all, or those up to the one that completes the object or shows that it
        is no call."""
        for position, char in enumerate(text):
            self._read(char)
            if self.done or self.failed:
                return position + 1
        return len(text)

    def take_arguments(self) -> str:
        """Return the text of the arguments that was read and not returned yet. Arguments written as a JSON string are unpacked, so they are
        returned as a whole. If they are null, or absent from a complete object, return `{}`."""
        if self._arguments.startswith('"') and not self._any_arguments:
            if self._strings.inside and self._key in ARGUMENT_KEYS and not self._at_key:
                return ""  # the string is not complete
            try:
                unpacked = json.loads(self._arguments)
            except ValueError:
                return ""
            self._arguments = StringEscaper().escaped(whole_characters(str(unpacked)))
        if NULL.startswith(self._arguments) and not self._any_arguments:
            if not (self.done or self._arguments == NULL):
                return ""
            self._arguments = "{}"
        taken, self._arguments = self._arguments, ""
        self._any_arguments = self._any_arguments or bool(taken)
        return taken

    def _read(self, char: str) -> None:
        """Read the next character of the object."""
        is_in_string = self._strings.inside
        written = self._strings.escaped_char(char)
        if is_in_string or char == '"':
            self._keep(written)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1 or self._bare_arguments:
                self._keep(char)
        elif char in "}]":
            self._close(char)
        elif self._depth > 1 or self._bare_arguments:
            self._keep(char)
        elif char == ":" and self._at_key:
            self._end_key()
        elif char == ",":
            self._end_value()
        elif not char.isspace():
            self._keep(char)

    def _close(self, char: str) -> None:
        """Read a closing brace or bracket."""
        self._depth -= 1
        if self._depth or self._bare_arguments:
            self._keep(char)
        else:
            self._end_value()
        self.done = not (self._depth or self.failed)

    def _keep(self, text: str) -> None:
        """Add text to the arguments, or to the key or value that is being read."""
        if self._bare_arguments or (self._key in ARGUMENT_KEYS and not self._at_key):
            self._arguments += text
        else:
            self._span += text

    def _end_key(self) -> None:
        """Note the key that was just read. The object is no call if the key is no string, or if it is a key in the head that calls do not
        have. A second key of arguments is ignored, and its value, too."""
        key = self._parse_span()
        self._at_key = False
        is_second = key in ARGUMENT_KEYS and (self._any_arguments or self._arguments != "")
        self._key = key if isinstance(key, str) and not is_second else ""
        self.failed = self.failed or not isinstance(key, str) or (self.in_head and key not in KEYS)
        self._any_end = self._any_end or key in self._head_ends

    def _end_value(self) -> None:
        """Note the value that was just read, if it is the name of the tool. The object is no call if no marker has announced one and no
        offered tool has this name. A key comes next."""
        if not self._at_key and self._key not in ARGUMENT_KEYS:
            value = self._parse_span()
            if self._key in NAME_KEYS and self.name is None:
                if isinstance(value, str) and (self._offered is None or value in self._offered):
                    self.name = whole_characters(value)
                else:
                    self.failed = self.failed or self._offered is not None
        self._at_key = True
        self._key = self._span = ""

    def _parse_span(self) -> object:
        """Parse the key or value that was just read. If it is no JSON, the object is no call: return None."""
        span, self._span = self._span, ""
        try:
            return json.loads(span)
        except (ValueError, RecursionError):
            self.failed = True
            return None
