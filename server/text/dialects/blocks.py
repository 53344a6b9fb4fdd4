"""Answers of one think block, then text with calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.messages import Constraint
from server.text.dialects.calls.syntax import CallParser, CallSyntax
from server.text.dialects.format import AnswerRules, Format
from server.text.dialects.thoughts import Thoughts, ThoughtSplitter
from server.text.dialects.tool import ToolSchema
from server.text.grammar import Specials
from server.text.parts import Content, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(Format):
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

    def framed(self, constraint: Constraint, specials: Specials, thoughts: Thoughts | None, *, thinking: bool, is_call: bool) -> Constraint:
        return constraint if thoughts is None else thoughts.before(constraint, specials, open_already=thinking)


class BlockParser:
    def __init__(self, calls: CallSyntax, rules: AnswerRules) -> None:
        thoughts = rules.thoughts if rules.splits else None
        self._splitter = None if thoughts is None else ThoughtSplitter(thoughts, inside=rules.inside)
        self._calls = calls.parser(rules.tools, rules.max_calls) if rules.tools else None

    @property
    def reasons(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def done(self) -> bool:
        return self._calls is not None and self._calls.done

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = [Content(text)] if self._splitter is None else self._splitter.push(text)
        return parts if self._calls is None else self._find_calls(parts, self._calls)

    def finish(self) -> list[Part]:
        parts = [] if self._splitter is None else self._splitter.finish()
        if self._calls is None:
            return parts
        return self._find_calls(parts, self._calls) + self._calls.finish()

    @staticmethod
    def _find_calls(parts: list[Part], calls: CallParser) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found += calls.push(part.text) if isinstance(part, Content) else (part,)
        return found
