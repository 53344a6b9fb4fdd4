"""Write images and recordings into a conversation and into its prompt, for models that read them.

Until the chat template has rendered the prompt, a marker stands for each image or recording in the texts of messages. The marker is the
text of a special token, which the chat template writes, too. No text of a client may contain the marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Protocol

from server.errors import INVALID_VALUE, ApiError


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts that stand for an image or a recording in messages, prompts and errors."""

    marker: str
    part: str  # `type` of the part that stands for an image or a recording in the content that a chat template reads
    names: str  # plural noun for what the markers stand for
    begin: str = ""  # text of the token that the tokenizer puts before every text; empty: there is none


class Sense(Protocol):
    """Writes what a model reads beside text: images, or recordings."""

    reads: ClassVar[type[Any]]  # class of a decoded image or recording

    @property
    def markers(self) -> Markers: ...

    def written(self, found: Any, /) -> str:
        """Return the text of the tokens of an image or a recording, which takes the place of its marker."""
        ...


@dataclass(frozen=True, slots=True)
class Senses:
    """All senses of a model: it sees images, hears recordings, does both, or only reads text."""

    senses: tuple[Sense, ...]

    def filled(self, prompt: str, found: Sequence[Any]) -> tuple[str, list[Any]]:
        """Return a prompt with the tokens of images and recordings in place of their markers, and the images and recordings in the order of
        the prompt. `found` has the images and recordings of the messages. If the template does not write the token that the tokenizer puts
        before texts, add that token: LLaVA's template leaves this to transformers' processor. Raise ApiError if the prompt has more or
        fewer markers than the messages have images and recordings."""
        pieces = self._pieces(prompt)
        marks = pieces[1::2]
        for sense in self.senses:
            self._check_count(sense, marks, found)
        by_marker = {sense.markers.marker: (sense, iter([one for one in found if isinstance(one, sense.reads)])) for sense in self.senses}
        ordered: list[Any] = []
        for number, mark in enumerate(marks):
            sense, waiting = by_marker[mark]
            ordered.append(next(waiting))
            pieces[2 * number + 1] = sense.written(ordered[-1])
        text = "".join(pieces)
        for sense in self.senses:
            text = text if text.startswith(sense.markers.begin) else sense.markers.begin + text
        return text, ordered

    def in_parts(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages in which a content with markers is a list of parts, as templates expect: texts, and a part for each marker."""
        return [
            {**message, "content": self._parts(pieces)}
            if isinstance(content := message.get("content"), str) and len(pieces := self._pieces(content)) > 1
            else {**message}
            for message in messages
        ]

    def _pieces(self, text: str) -> list[str]:
        """Divide a text at its markers. Return texts and markers in turn; the first and the last piece are texts, maybe empty. A text may
        have megabytes, which `split` reads faster than a regular expression."""
        pieces = [text]
        for sense in self.senses:
            marker = sense.markers.marker
            pieces = [part for number, piece in enumerate(pieces) for part in ([piece] if number % 2 else _divided(piece, marker))]
        return pieces

    def _parts(self, pieces: Sequence[str]) -> list[dict[str, str]]:
        """Return texts and markers, which come in turn, as the parts of a content."""
        types = {sense.markers.marker: sense.markers.part for sense in self.senses}
        parts = [{"type": types[piece]} if number % 2 else {"type": "text", "text": piece} for number, piece in enumerate(pieces)]
        return [part for part in parts if part.get("text") != ""]

    def _check_count(self, sense: Sense, marks: Sequence[str], found: Sequence[Any]) -> None:
        """Raise ApiError unless the prompt has as many markers of a sense as the messages have images or recordings. `marks`: all markers
        of the prompt; `found`: all images and recordings of the messages."""
        markers, given = sense.markers, sum(isinstance(one, sense.reads) for one in found)
        if (written := marks.count(markers.marker)) != given:
            message = (
                f"the chat template writes {written} {markers.names}, and the messages have {given}: "
                f"put {markers.names} only where the template shows them, and {markers.marker!r} in no text"
            )
            raise ApiError(INVALID_VALUE, message, param="messages")


def _divided(text: str, marker: str) -> list[str]:
    """Divide a text at each occurrence of `marker`. Return texts and markers in turn."""
    first, *others = text.split(marker)
    return [first, *chain.from_iterable((marker, other) for other in others)]
