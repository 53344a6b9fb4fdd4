"""Limit the time to decode a JSON text: count its values and measure its depth while it arrives, without parsing it.

Decoding and validating are one call each, and nothing can interrupt these calls. The number of values and escapes decides how long a call
takes, far more than the length: 8 MiB of one string decode in 5 ms, 8 MiB of escaped newlines in 28 ms, 8 MiB of empty objects in 250 ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from server.errors import BODY_TOO_COMPLEX, INVALID_JSON, ApiError

MAX_NUMBERS = 5 << 16  # largest number of numbers in a body, which are mostly token ids
MAX_PARTS = 3 << 13  # largest number of objects, lists, names and texts; each takes as long to decode as ten numbers
MAX_ESCAPES = 1 << 21  # backslashes; 8 MiB of "\u00e9" have 1.4 million
MAX_DEPTH = 64  # levels of nested lists and objects, limited because later steps are recursive

TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
PIECE_BYTES = 64 << 10  # scanned within 3 ms
KINDS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as int8: 1 opens a level, -1 closes one
NO_MARKS = bytes(set(range(256)) - set(b"[{]},"))  # all bytes but those that are counted outside of strings


@dataclass(slots=True)
class JsonScan:
    """Counts the values of a JSON text that arrives in pieces. Invalid JSON is counted as well; the decoder refuses it."""

    num_commas: int = 0  # commas outside of strings
    num_parts: int = 0  # objects, lists, names and texts
    num_escapes: int = 0  # backslashes
    depth: int = 0  # levels that are open after the last piece
    _is_inside: bool = False  # the last piece ended inside a string
    _carried: bytes = b""  # a backslash at the end of the last piece, whose escape continues in the next

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Scan the next piece. Raise ApiError as soon as a limit is exceeded."""
        view = memoryview(data)
        for at in range(0, len(view), PIECE_BYTES):
            self._feed(bytes(view[at : at + PIECE_BYTES]))
            self._check()

    def _feed(self, piece: bytes) -> None:
        """Count the values of a piece. Raise ApiError if the JSON nests too deeply."""
        piece = self._carried + piece
        num_last = len(piece) - len(piece.rstrip(b"\\"))
        piece, self._carried = (piece[:-1], b"\\") if num_last % 2 else (piece, b"")
        self.num_escapes += piece.count(b"\\")
        began_inside = self._is_inside
        # The appended quote ends a string that continues in the next piece. If no string continues, the quote starts a string without an
        # end, which TEXT does not match.
        outside, num_texts = TEXT.subn(b"", (b'"' if began_inside else b"") + piece + b'"')
        self._is_inside = not outside.endswith(b'"')
        marks = outside.translate(None, NO_MARKS)
        self.num_commas += marks.count(b",")
        num_opened = marks.count(b"[") + marks.count(b"{")
        self.num_parts += num_texts - began_inside + num_opened
        if self.depth + num_opened <= MAX_DEPTH:  # no level of the piece is too deep, in whatever order it opens and closes them
            self.depth += num_opened - marks.count(b"]") - marks.count(b"}")
            return
        depths = np.cumsum(np.frombuffer(marks.translate(KINDS, b","), np.int8), dtype=np.int64) + self.depth
        self.depth = int(depths[-1])
        if depths.max() > MAX_DEPTH:
            raise ApiError(INVALID_JSON, f"the JSON nests deeper than {MAX_DEPTH} levels")

    def _check(self) -> None:
        """Raise ApiError if a limit is exceeded."""
        for num, limit, what in (
            (self.num_parts, MAX_PARTS, "objects, lists, names and texts"),
            # A lower bound on the numbers (and true, false, null): each object, list, name or text accounts for at most one comma, so every
            # other comma belongs to a number.
            (self.num_commas - self.num_parts, MAX_NUMBERS, "numbers"),
            (self.num_escapes, MAX_ESCAPES, "backslashes"),
        ):
            if num > limit:
                raise ApiError(BODY_TOO_COMPLEX, f"the JSON has more than {limit} {what}; split the request")
