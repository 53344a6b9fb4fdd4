"""Handle thoughts that are one block at the beginning of an answer: define the markers of the block, separate it from other text, and put
its grammar before a constraint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from server.messages import Constraint
from server.text.detokenize import overlap
from server.text.grammar import Specials, literal, marker_rule, up_to_marker
from server.text.parts import Content, Part, Reasoning


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The markers around a block of thoughts."""

    opening: str
    closing: str
    label: str = ""  # text after the opening marker that belongs to it

    @property
    def begin(self) -> str:
        """The opening marker and its label."""
        return self.opening + self.label

    def are_open(self, prompt: str) -> bool:
        """Return whether a prompt ends with the opening of a block."""
        return prompt.rstrip("\n").endswith(self.begin.rstrip("\n"))

    def are_begun(self, answer: str) -> bool:
        """Return whether `answer`, the text of an answer so far, begins with a block that it has not closed."""
        return answer.lstrip().startswith(self.begin) and self.closing not in answer

    def in_vocabulary(self, ids_of: Callable[[str], list[int]]) -> bool:
        """Return whether each marker is a single token of the vocabulary. A model with such tokens is assumed to write thoughts, unless a
        setting says otherwise."""
        return all(len(ids_of(marker)) == 1 for marker in (self.opening, self.closing))

    def ids(self, specials: Mapping[str, int]) -> tuple[int, int] | None:
        """Return the ids of both markers, or None if they are not single tokens."""
        if self.opening in specials and self.closing in specials:
            return specials[self.opening], specials[self.closing]
        return None

    def before(self, constraint: Constraint, specials: Specials, *, open_already: bool) -> Constraint:
        """Return `constraint` with thoughts allowed before the answer: an optional block or, if `open_already`, the rest of the block that
        the prompt has opened. At most two line ends may follow the block, because a small model would write line ends for ever rather than
        an answer that it is forced to write."""
        opening = f"{marker_rule(self.opening, specials)} {literal(self.label)}".rstrip()
        start = "thought gap" if open_already else f"({opening} thought gap)?"
        head = "\n".join([f"start: {start} answer", up_to_marker("thought", self.closing, specials), "gap: /\\n{0,2}/"])
        return msgspec.structs.replace(constraint, head=head)


THINK = Thoughts("<think>", "</think>")  # by far the most common markers


class ThoughtSplitter:
    """Splits text into reasoning and content. The result does not depend on how the text is cut into pieces.

    A block is recognised only at the beginning of the answer, after white space at most, or if the prompt has already opened it (`inside`).
    Newlines after a marker are dropped.
    """

    def __init__(self, thoughts: Thoughts, *, inside: bool) -> None:
        self.inside = inside  # the text so far ends inside the block
        self._thoughts = thoughts
        self._held = ""  # undecided text: it may be the beginning of a marker
        self._begun = inside  # True once it is known whether the answer begins with a block
        self._after_marker = inside  # newlines are still dropped, because they follow a marker

    def push(self, text: str) -> list[Part]:
        """Read more text. Return the parts that are certain."""
        begin, closing = self._thoughts.begin, self._thoughts.closing
        text = self._held + text
        self._held = ""
        parts: list[Part] = []
        if not self._begun:
            stripped = text.lstrip()
            if stripped.startswith(begin):
                self._begun = self.inside = self._after_marker = True
                text = stripped.removeprefix(begin)
            elif begin.startswith(stripped):
                self._held = text
                return parts
            else:
                self._begun = True
        if self.inside:
            thought, marker, text = text.partition(closing)
            if not marker:
                keep = overlap(thought, closing)
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
        """Return the text that was held back, as a thought if it is inside the block, or else as content."""
        text, self._held = self._held, ""
        if not text:
            return []
        return [Reasoning(text) if self.inside else Content(text)]

    def _without_newlines(self, text: str) -> str:
        """Return a text without newlines at its beginning, if it follows a marker."""
        if not self._after_marker:
            return text
        text = text.lstrip("\n")
        self._after_marker = not text
        return text
