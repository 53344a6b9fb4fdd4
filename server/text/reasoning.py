"""Separate the think block at the beginning of a streamed answer from the rest."""

from __future__ import annotations

from server.text.detokenize import overlap
from server.text.parts import Content, Part, Reasoning

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Splits text into reasoning and content. The result does not depend on how the text is cut into pieces.

    A think block is recognised only at the beginning of the answer, or if the prompt has already opened it (`inside`). Newlines after a
    marker are dropped.
    """

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        self._held = ""  # undecided text: it may be the beginning of a marker
        self._begun = inside  # True once it is known whether the answer begins with a block
        self._after_marker = inside  # newlines are still dropped, because they follow a marker

    def push(self, text: str) -> list[Part]:
        text = self._held + text
        self._held = ""
        parts: list[Part] = []
        if not self._begun:
            stripped = text.lstrip()
            if stripped.startswith(OPEN):
                self._begun = self.inside = self._after_marker = True
                text = stripped.removeprefix(OPEN)
            elif OPEN.startswith(stripped):
                self._held = text
                return parts
            else:
                self._begun = True
        if self.inside:
            thought, marker, text = text.partition(CLOSE)
            if not marker:
                keep = overlap(thought, CLOSE)
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
            if thought := self._without_newlines(thought):
                parts.append(Reasoning(thought))
            if not marker:
                return parts
            self.inside = False
            self._after_marker = True
        if text := self._without_newlines(text):
            parts.append(Content(text))
        return parts

    def finish(self) -> list[Part]:
        text, self._held = self._held, ""
        if not text:
            return []
        return [Reasoning(text) if self.inside else Content(text)]

    def _without_newlines(self, text: str) -> str:
        if not self._after_marker:
            return text
        text = text.lstrip("\n")
        self._after_marker = not text
        return text
