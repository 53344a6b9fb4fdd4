"""Parse the text of one chat choice into parts: a think block first, then tool calls and content; or messages in several channels."""

from __future__ import annotations

from dataclasses import dataclass

from server.text.dialect import Dialect
from server.text.harmony import ChannelParser
from server.text.parts import Content, Part
from server.text.reasoning import ReasoningSplitter
from server.text.tools import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerRules:
    dialect: Dialect
    thinking: bool = False  # the prompt has opened a think block
    split_reasoning: bool = True
    tool_names: frozenset[str] = frozenset()  # empty: no calls are parsed
    max_calls: int | None = None


def answer_parser(rules: AnswerRules) -> AnswerParser | ChannelParser:
    """Return the parser for an answer. AnswerParser and ChannelParser have the same methods and return the same kinds of parts."""
    if rules.dialect.has_channels:
        return ChannelParser(rules.tool_names, rules.max_calls, splits=rules.split_reasoning and rules.dialect.thinks)
    return AnswerParser(rules)


class AnswerParser:
    def __init__(self, rules: AnswerRules) -> None:
        splits = rules.split_reasoning and (rules.dialect.thinks or rules.thinking)
        self._splitter = ReasoningSplitter(inside=rules.thinking) if splits else None
        self._tools = ToolParser(rules.dialect.tools, rules.tool_names, rules.max_calls) if rules.tool_names else None

    @property
    def reasons(self) -> bool:
        """True if the next token belongs to a think block."""
        return self._splitter is not None and self._splitter.inside

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def done(self) -> bool:
        """True once the allowed number of calls has been made, so that any further text is ignored."""
        return self._tools is not None and self._tools.done

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = [Content(text)] if self._splitter is None else self._splitter.push(text)
        return parts if self._tools is None else self._find_calls(parts, self._tools)

    def finish(self) -> list[Part]:
        parts = [] if self._splitter is None else self._splitter.finish()
        if self._tools is None:
            return parts
        return self._find_calls(parts, self._tools) + self._tools.finish()

    @staticmethod
    def _find_calls(parts: list[Part], tools: ToolParser) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found += tools.push(part.text) if isinstance(part, Content) else (part,)
        return found
