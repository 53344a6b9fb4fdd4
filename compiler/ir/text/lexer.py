"""The lexer, and a cursor over its tokens that raises parse errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import NamedTuple

from compiler.ir.errors import CompileError
from compiler.ir.text.syntax import NAME, RESERVED

MAX_NESTING = 100  # nesting depth of brackets, blocks and operators: keeps the recursive functions of the parser within Python's stack
MOST_AHEAD = 2  # the parser looks at most this many tokens beyond the next one
_MAX_INT = 2**64 - 1


class ParseError(CompileError):
    """Raised if the text is not a program. The message shows the line, or the part of a long line around the error, and points at the
    column. `message` is the message alone."""

    def __init__(self, message: str, source: str, offset: int) -> None:
        self.line = source.count("\n", 0, offset) + 1
        start = source.rfind("\n", 0, offset) + 1
        self.column = offset - start + 1
        self.message = message
        text = source[start:].split("\n", 1)[0].replace("\t", " ")
        # Show only a part of a long line, around the error.
        left = max(0, self.column - 90)
        shown = text[left : left + 120]
        super().__init__(f"line {self.line}, column {self.column}: {message}\n  {shown}\n  {' ' * (self.column - 1 - left)}^")


class Kind(StrEnum):
    NAME = "name"
    INT = "integer"
    FLOAT = "float"
    STRING = "string"
    MARK = "mark"
    END = "end of text"


class Token(NamedTuple):
    kind: Kind
    text: str
    offset: int

    def __str__(self) -> str:
        return self.kind if self.kind is Kind.END else repr(self.text)


_TOKEN = re.compile(
    rf"""
      (?P<space>  (?: [ \t\r\n] | \#[^\n]* )+ )
    | (?P<name>   {NAME} )
    | (?P<float>  \d+ (?: \.\d+ (?:[eE][+-]?\d+)? | [eE][+-]?\d+ ) )
    | (?P<integer> \d+ )
    | (?P<string> "(?: [^"\\\n] | \\[^\n] )*" )
    | (?P<mark>   -> | \.\.\. | \.\. | // | << | >> | <= | == | != | [-()\[\]{{}},:=+*/%<>&|^~?@.] )
    """,
    re.VERBOSE | re.ASCII,
)


_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_KINDS = {kind.value: kind for kind in Kind}


def tokenize(source: str) -> list[Token]:
    """Split the text into tokens. Spaces and comments are left out. The last token is followed by enough end tokens for the longest
    look-ahead. Raise ParseError for a character that begins no token, and for an integer that does not fit in 64 bits."""
    tokens: list[Token] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            what = "a string that does not end on its line" if source[at] == '"' else f"unexpected character {source[at]!r}"
            raise ParseError(what, source, at)
        kind = _KINDS.get(str(match.lastgroup))
        if kind is not None:
            token = Token(kind, match.group(), at)
            # Refuse large integers here, so that every integer in the text fits 64 bits, and Python's own limit on digits is never reached.
            if kind is Kind.INT and (len(token.text) > 20 or int(token.text) > _MAX_INT):
                raise ParseError(f"{token.text[:24]} does not fit in 64 bits", source, at)
            tokens.append(token)
        at = match.end()
    return [*tokens, *[Token(Kind.END, "", len(source))] * (1 + MOST_AHEAD)]


class _Nesting:
    """A context manager that enters one more level of nesting, or raises a ParseError if the text is too deep."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    def __enter__(self) -> None:
        if self.cursor.nesting_left == 0:
            raise self.cursor.too_deep(self.cursor.peek())
        self.cursor.nesting_left -= 1

    def __exit__(self, *_: object) -> None:
        self.cursor.nesting_left += 1


class Cursor:
    """A place in the tokens of a text. The classes of the parser derive from `Cursor`. `expect`, `name` and `integer` raise ParseError if
    the next token is not what they expect."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokenize(source)
        self.at_token = 0
        self.nesting_left = MAX_NESTING
        self.nested = _Nesting(self)

    def peek(self) -> Token:
        """Return the next token without reading it."""
        return self.tokens[self.at_token]

    def take(self) -> Token:
        """Read the next token. At the end of the text, return the end token again and again."""
        token = self.tokens[self.at_token]
        self.at_token += token.kind is not Kind.END
        return token

    def at(self, *texts: str, ahead: int = 0) -> bool:
        """Return whether the text of the next token, or of the one `ahead` places after it, is one of these. The text of a string token
        includes its quotes, so it never equals a word or a mark."""
        return self.tokens[self.at_token + ahead].text in texts

    def at_kind(self, *kinds: Kind, ahead: int = 0) -> bool:
        return self.tokens[self.at_token + ahead].kind in kinds

    def accept(self, text: str) -> bool:
        """Read the next token if it has this text, and return whether it has."""
        if self.at(text):
            self.take()
            return True
        return False

    def expect(self, text: str, why: str = "") -> Token:
        """Read a token with this text. `why` follows the text in the message of the error."""
        if not self.at(text):
            raise self.error(f"expected {text!r}{why and ' ' + why}, found {self.peek()}")
        return self.take()

    def name(self, what: str) -> Token:
        """Read a name that the text defines or uses. Reserved words are refused."""
        token = self.peek()
        if token.kind is not Kind.NAME:
            raise self.error(f"expected {what}, found {token}")
        if token.text in RESERVED:
            raise self.error(f"expected {what}, found {token}, which is a reserved word")
        return self.take()

    def integer(self, what: str) -> int:
        """Read an integer, which may be negative. `what` names the integer in the message of the error."""
        sign = -1 if self.accept("-") else 1
        if not self.at_kind(Kind.INT):
            raise self.error(f"expected {what}, found {self.peek()}")
        return sign * int(self.take().text)

    def error(self, message: str, at: Token | None = None) -> ParseError:
        """Return an error that points at the token `at`, or else at the next token. The caller raises it."""
        return ParseError(message, self.source, (at or self.peek()).offset)

    def unknown(self, noun: str, token: Token, known: Iterable[str]) -> ParseError:
        """Return an error for an unknown name, with similar names as a hint, or else with some of the known names."""
        names = sorted(known)
        near = get_close_matches(token.text.strip('"'), names, n=3, cutoff=0.6)
        hint = f"similar: {', '.join(near)}" if near else f"known: {', '.join(names[:20]) or 'none'}"
        return self.error(f"unknown {noun} {token.text}; {hint}", token)

    def too_deep(self, at: Token) -> ParseError:
        return self.error(f"the text is nested more than {MAX_NESTING} levels deep; bind inner parts to names", at)

    def skip_to(self, *texts: str) -> None:
        """Move, without reading, to the first of these marks or words that is outside all brackets that open from here on, or to the end of
        the text."""
        depth = 0
        for at in range(self.at_token, len(self.tokens) - MOST_AHEAD):
            text = self.tokens[at].text
            if (depth == 0 and text in texts) or not text:
                self.at_token = at
                return
            if text in _BRACKETS:
                depth += _BRACKETS[text]
