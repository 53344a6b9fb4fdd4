"""Define the interface of formats, in which models write thoughts, calls and content.

Format            a whole answer: its parser, and its constraints
  BlockFormat       a think block, then text and calls: blocks.py. The calls are written in a `CallSyntax` (calls/syntax.py)
  Harmony           messages in several channels: formats/harmony.py
Dialect           a format with the ids of its markers in one model's vocabulary: dialect.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.messages import Constraint
from server.text.dialects.calls.demanded import DemandedCallParser
from server.text.dialects.calls.syntax import CallParser, CallSyntax
from server.text.dialects.thoughts import THINK, Thoughts
from server.text.dialects.tool import ToolSchema
from server.text.grammar import Specials

Bounds = tuple[tuple[int, ...], int]  # the tokens that open thoughts, one after the other, and the token that ends them


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How the answers of one request are parsed."""

    format: Format
    thoughts: Thoughts | None = None  # None: the format has no block of thoughts
    inside: bool = False  # the prompt has opened a think block
    splits: bool = False  # thoughts are parts of their own, not content
    tools: Sequence[ToolSchema] = ()  # empty: no calls are parsed
    max_calls: int | None = None  # most calls that are parsed; None: any number
    demanded: bool = False  # the answer must be calls

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        parser = self.format.parser(self)
        return DemandedCallParser(parser) if self.demanded else parser


class AnswerParser(CallParser, Protocol):
    """Finds the parts of an answer. However the stream is cut into pieces, the parts are the same; only the text of a part may come in
    different pieces. `done` is also True once the answer has ended by itself."""

    @property
    def reasons(self) -> bool:
        """True if the next token belongs to a thought."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(ABC):
    """How a model writes whole answers."""

    name: str
    aliases: tuple[str, ...] = ()  # other names that the setting `tool_parser` accepts, such as the names of other engines' parsers
    thoughts: tuple[Thoughts, ...] = (THINK,)  # pairs of markers between which a model may write thoughts; the first pair is the usual one

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, other than those of its thoughts, that may be single tokens."""
        ...

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts that distinguish the format from other formats whose parsers read the same calls."""
        return self.markers if self.call_syntax is None else self.call_syntax.signs

    @property
    def call_syntax(self) -> CallSyntax | None:
        """The syntax of calls between other text; None if an answer is no text with calls in it."""
        return None

    def thought_bounds(self, thoughts: Thoughts | None, ids_of: Callable[[str], list[int]]) -> Bounds | None:
        """Return the tokens that open thoughts, one after the other, and the token that ends them, or None if there are no such tokens."""
        if thoughts is None or not thoughts.in_vocabulary(ids_of):
            return None
        return tuple(ids_of(thoughts.opening)), ids_of(thoughts.closing)[0]

    @abstractmethod
    def parser(self, rules: AnswerRules) -> AnswerParser:
        """Return a parser for one answer, which follows `rules`."""
        ...

    @abstractmethod
    def forced_calls(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> Constraint:
        """Return the constraint for one call of any of `tools`. If `several`, allow more calls if the format has several calls in one
        answer."""
        ...

    @abstractmethod
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
        """Return `constraint` preceded by the thoughts that the model may write, or is already writing (`thinking`). `thoughts` is None if
        the model writes none, or if the format has no block of thoughts. `is_call`: `constraint` describes calls. `calls`: the constraint
        for calls that the model may write instead of the answer; None: there are no such calls."""
        ...
