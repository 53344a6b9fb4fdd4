"""Text that arrives in pieces, read by generators that do not see the pieces: a method that needs more text yields.

    def read(self):
        name, _ = yield from stream.up_to(">")
        ...

The caller of `read` appends each piece to `held`, and runs the generator (`next`) up to the point where it needs more text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from server.text.detokenize import overlap

T = TypeVar("T")
Steps = Generator[None, None, T]


class Stream:
    """The text of an answer, of which a part has arrived."""

    def __init__(self) -> None:
        self.held = ""  # text that has arrived and was not read yet
        self.ended = False  # no more text arrives
        self._taken: list[str] = []

    @property
    def taken(self) -> str:
        """The text read since the last `forget`."""
        return "".join(self._taken)

    def forget(self) -> None:
        """Forget the text read so far, so that `taken` begins anew."""
        self._taken.clear()

    def take(self, length: int) -> str:
        """Read the next `length` characters, and return them."""
        text, self.held = self.held[:length], self.held[length:]
        self._taken.append(text)
        return text

    def find(self, *texts: str) -> Steps[str]:
        """Read one of `texts` if it comes next, and return it. Return an empty text if none does."""
        while True:
            for text in texts:
                if text and self.held.startswith(text):
                    return self.take(len(text))
            if self.ended or not any(text.startswith(self.held) for text in texts):
                return ""
            yield

    def peek(self) -> Steps[str]:
        """Return the next character, without reading it; an empty text at the end."""
        while not (self.held or self.ended):
            yield
        return self.held[:1]

    def skip(self, chars: str) -> Steps[None]:
        """Read the characters that come next, as long as they are among `chars`. Stop at any other character, or at the end of the text."""
        while True:
            self.take(len(self.held) - len(self.held.lstrip(chars)))
            if self.held or self.ended:
                return
            yield

    def up_to(self, *markers: str) -> Steps[tuple[str, str]]:
        """Read up to and with the marker that comes first. Return the text before it, and the marker, which is empty if the text ends
        first."""
        pieces: list[str] = []
        marker = yield from self.pieces_up_to(markers, pieces.append)
        return "".join(pieces), marker

    def pieces_up_to(self, markers: tuple[str, ...], add: Callable[[str], object]) -> Steps[str]:
        """Read up to and with the marker that comes first. Give the text before it to `add` in pieces, as soon as they cannot be part of a
        marker. Return the marker, or an empty text if the text ends first."""
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self.held.find(marker)) >= 0]
            at, marker = (min(found)[0], min(found)[2]) if found else (len(self.held), "")
            if not self.ended:
                at = min(at, len(self.held) - max(overlap(self.held, one) for one in markers)) if not found else at
            if at:
                add(self.take(at))
            if marker or self.ended:
                self.take(len(marker))
                return marker
            yield
