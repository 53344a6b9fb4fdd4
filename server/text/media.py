"""Write images or recordings into a conversation and into its prompt, for models that read either.

Until the chat template has rendered the prompt, a marker stands for an image or a recording in texts. It is the text of a special token,
which the chat template writes, too; no text of a client may contain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.errors import INVALID_VALUE, ApiError


class Sense(Protocol):
    """Writes what a model reads beside text."""

    @property
    def marker(self) -> str: ...

    def expanded(self, prompt: str, found: Sequence[Any], /) -> str:
        """Return a prompt with the tokens of each image or recording in place of its marker."""
        ...

    def in_parts(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages in which a content with markers is a list of parts, as templates expect."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    marker: str
    part: str  # type of a part in the content that a chat template reads
    names: str  # what the markers stand for
    begin: str = ""  # text of the token that the tokenizer puts before every text; empty: there is none

    def filled(self, prompt: str, written: Sequence[str]) -> str:
        """Return a prompt with these texts in place of the markers. If the template does not write the token that the tokenizer puts before
        texts, add it: LLaVA's template leaves this to transformers' processor."""
        pieces = prompt.split(self.marker)
        if len(pieces) != len(written) + 1:
            message = (
                f"the chat template writes {len(pieces) - 1} {self.names}, and the messages have {len(written)}: "
                f"put {self.names} only where the template shows them, and {self.marker!r} in no text"
            )
            raise ApiError(INVALID_VALUE, message, param="messages")
        found = [pieces[0]]
        for text, piece in zip(written, pieces[1:], strict=True):
            found += [text, piece]
        text = "".join(found)
        return text if text.startswith(self.begin) else self.begin + text

    def in_parts(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages in which a content with markers is a list of parts, as templates expect: texts, and a part for each marker."""
        return [
            {**message, "content": self._parts(content)}
            if isinstance(content := message.get("content"), str) and self.marker in content
            else {**message}
            for message in messages
        ]

    def _parts(self, content: str) -> list[dict[str, str]]:
        first, *others = content.split(self.marker)
        parts = [{"type": "text", "text": first}] if first else []
        for text in others:
            parts += [{"type": self.part}, *([{"type": "text", "text": text}] if text else [])]
        return parts
