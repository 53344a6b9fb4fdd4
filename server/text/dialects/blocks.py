"""Parse and constrain answers that may have one think block, and then text that may have calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.messages import Constraint
from server.text.dialects.calls.plain_calls import PlainCallParser
from server.text.dialects.calls.syntax import CallParser, CallSyntax
from server.text.dialects.format import AnswerRules, Format
from server.text.dialects.thoughts import Thoughts, ThoughtSplitter
from server.text.dialects.tool import ToolSchema
from server.text.grammar import Specials, or_calls
from server.text.parts import CallArguments, CallStart, Content, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(Format):
    """A format of answers with one think block, and then text with calls in the syntax `calls`."""

    calls: CallSyntax

    @property
    def call_syntax(self) -> CallSyntax:
        return self.calls

    @property
    def markers(self) -> tuple[str, ...]:
        return self.calls.markers

    def parser(self, rules: AnswerRules) -> BlockParser:
        return BlockParser(self.calls, rules)

    def forced_calls(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> Constraint:
        return self.calls.forced(tools, specials, several=several)

    def framed(
        self,
        constraint: Constraint,
        specials: Specials,
        thoughts: Thoughts | None,
        *,
        thinking: bool,
        is_call: bool,
        calls: Constraint | None = None,
    ) -> Constraint:
        """Return the constraint for `thoughts`, if there are any, and then `constraint` or `calls`. `is_call` makes no difference here."""
        framed = constraint if thoughts is None else thoughts.before(constraint, specials, open_already=thinking)
        return framed if calls is None else or_calls(framed, calls)


class BlockParser:
    """Parses an answer with one think block, and then text with calls in it."""

    def __init__(self, calls: CallSyntax, rules: AnswerRules) -> None:
        thoughts = rules.thoughts if rules.splits else None
        self._splitter = None if thoughts is None else ThoughtSplitter(thoughts, inside=rules.inside)
        # what the format's parser leaves as content may have calls that are written as plain JSON
        plain = PlainCallParser(rules.tools, rules.max_calls, calls.id_length)
        self._readers: tuple[CallParser, ...] = (calls.parser(rules.tools, rules.max_calls), plain) if rules.tools else ()
        self._num_started = 0
        self._max_calls = rules.max_calls
        self._is_over = False  # a call beyond `max_calls` has begun

    @property
    def reasons(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    @property
    def num_calls(self) -> int:
        return sum(reader.num_calls for reader in self._readers)

    @property
    def done(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def push(self, text: str) -> list[Part]:
        """Read more text: separate thoughts from content, and let each reader find calls in the content that the reader before it has
        left."""
        parts: list[Part] = [Content(text)] if self._splitter is None else self._splitter.push(text)
        for reader in self._readers:
            parts = _read_by(reader, parts)
        return self._numbered(parts)

    def finish(self) -> list[Part]:
        parts = [] if self._splitter is None else self._splitter.finish()
        for reader in self._readers:
            parts = _read_by(reader, parts) + reader.finish()
        return self._numbered(parts)

    def _numbered(self, parts: list[Part]) -> list[Part]:
        """Return `parts` with the calls numbered in the order in which they begin, whichever reader found them. Drop the first call beyond
        `max_calls` and everything after it, also in later calls of this method."""
        found: list[Part] = []
        for part in parts:
            self._is_over |= isinstance(part, CallStart) and self._num_started == self._max_calls
            if self._is_over:
                break
            match part:
                case CallStart():
                    self._num_started += 1
                    found.append(replace(part, index=self._num_started - 1))
                case CallArguments():
                    found.append(replace(part, index=self._num_started - 1))
                case _:
                    found.append(part)
        return found


def _read_by(reader: CallParser, parts: list[Part]) -> list[Part]:
    """Return `parts`, in which a reader has replaced content by calls and other content. Text that the reader holds back is put before a
    call that another reader has found."""
    found: list[Part] = []
    for part in parts:
        match part:
            case Content(text):
                found += reader.push(text)
            case CallStart() if isinstance(reader, PlainCallParser):
                found += (*reader.give_way(), part)
            case _:
                found.append(part)
    return found
