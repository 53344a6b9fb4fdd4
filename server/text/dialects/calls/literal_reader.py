"""Read values that are not written as JSON, such as Python's literals, from a stream."""

from __future__ import annotations

import re

from server.text.dialects.calls.characters import whole_characters
from server.text.dialects.calls.literals import LiteralStyle
from server.text.dialects.calls.stream import Steps, Stream

SPACE = " \t\r\n"
MAX_DEPTH = 32
UNQUOTED = frozenset(",\"'")  # characters that a key without quotation marks does not have
PAIRS = {"[": "]", "(": ")", "{": "}"}
NAMES = {"true": True, "false": False, "null": None, "none": None}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
MAX_SCALAR = 400  # most characters of a number
HIGH_SURROGATES, LOW_SURROGATES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class Malformed(Exception):
    """Raised if the text is no value, or if it ends before the value is complete (`cut`)."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut


def read_value(stream: Stream, style: LiteralStyle, depth: int = 0) -> Steps[object]:
    """Read one value. Raise Malformed if the text is no value, or ends before the value does. `depth`: the number of lists and objects that
    contain the value."""
    yield from stream.skip(SPACE)
    if style.quote and (yield from stream.find(style.quote)):
        return (yield from _up_to(stream, style.quote))
    first = yield from stream.peek()
    if first in ('"', "'"):
        return (yield from _read_text(stream, first))
    if first not in PAIRS or depth == MAX_DEPTH:
        return (yield from _read_scalar(stream))
    stream.take(1)
    if first == "{":
        return (yield from read_fields(stream, style, ":", "}", depth + 1))
    found: list[object] = []
    while not (yield from _at_end(stream, PAIRS[first])):
        found.append((yield from read_value(stream, style, depth + 1)))
    return found


def read_fields(stream: Stream, style: LiteralStyle, colon: str, end: str, depth: int = 0) -> Steps[dict[str, object]]:
    """Read keys and values up to `end`, with `colon` between each key and its value. Raise Malformed if the text has another form, or ends
    before `end`."""
    found: dict[str, object] = {}
    while not (yield from _at_end(stream, end)):
        first = yield from stream.peek()
        if first in ('"', "'") or (style.quote and first == style.quote[0]):
            key = str((yield from read_value(stream, style, MAX_DEPTH)))
            yield from stream.skip(SPACE)
            if not (yield from stream.find(colon)):
                raise _malformed(stream)
        else:
            text, mark = yield from stream.up_to(colon, end)
            if mark != colon:
                raise Malformed(cut=not mark)
            key = text.strip()
            if not UNQUOTED.isdisjoint(key):  # values without keys come before this key
                raise Malformed(cut=False)
        found[key] = yield from read_value(stream, style, depth)
    return found


def _at_end(stream: Stream, end: str) -> Steps[bool]:
    """Skip commas. Read `end` and return True if it comes next. Raise Malformed if the text ends here."""
    yield from stream.skip(SPACE + ",")
    if not (yield from stream.peek()):
        raise Malformed(cut=True)
    return bool((yield from stream.find(end)))


def _up_to(stream: Stream, marker: str) -> Steps[str]:
    """Read up to and with a marker. Return the text before it. Raise Malformed if the text ends first."""
    text, found = yield from stream.up_to(marker)
    if not found:
        raise Malformed(cut=True)
    return text


def _malformed(stream: Stream) -> Malformed:
    """Return the error for text that cannot be read further. The text was cut off if nothing more comes."""
    return Malformed(cut=stream.ended and not stream.held)


def _read_text(stream: Stream, quote: str) -> Steps[str]:
    """Read a string of Python or JSON with its escapes. `quote` is the character that opens it. Raise Malformed if the text ends before the
    string does."""
    stream.take(1)
    quote *= 3 if (yield from stream.find(quote * 2)) else 1
    pieces: list[str] = []
    while True:
        text, mark = yield from stream.up_to(quote, "\\")
        pieces.append(text)
        if mark == quote:
            return whole_characters("".join(pieces))
        if not (mark and (yield from stream.peek())):
            raise Malformed(cut=True)
        pieces.append((yield from _read_escape(stream)))


def _read_escape(stream: Stream) -> Steps[str]:
    """Read the characters after a backslash. Return the text for which they stand. An unknown escape stands for itself."""
    char = stream.take(1)
    if char not in HEX_LENGTHS:
        return ESCAPES.get(char, char if char in "\\\"'/" else f"\\{char}")
    length = HEX_LENGTHS[char]
    while len(stream.held) < length and not stream.ended:
        yield
    digits = stream.take(length)
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        return f"\\{char}{digits}"


def _read_scalar(stream: Stream) -> Steps[object]:
    """Read a number, true, false or null, up to a comma or a closing bracket. Raise Malformed if something else comes next, or if the text
    ends."""
    text = ""
    while (char := (yield from stream.peek())) and char not in ",]})" and len(text) < MAX_SCALAR:
        text += stream.take(1)
    text = text.strip()
    if not char:
        raise Malformed(cut=True)
    if NUMBER.fullmatch(text):
        number = float(text) if set(text) & set(".eE") else int(text)
        if abs(number) != float("inf"):
            return number
    if text.lower() in NAMES:
        return NAMES[text.lower()]
    raise Malformed(cut=False)
