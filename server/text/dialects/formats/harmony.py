"""The harmony format, which gpt-oss writes: thoughts, calls and content are messages in several channels.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the content<|return|>

A message is a header up to `<|message|>`, and a body up to one of ENDS. The prompt ends inside the first header, after
`<|start|>assistant`. However the stream is cut into pieces, the parts are the same; only the text of a part may come in different pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from server.messages import Constraint, ConstraintKind
from server.text.detokenize import overlap
from server.text.dialects.calls.characters import StringEscaper
from server.text.dialects.calls.syntax import new_call_id
from server.text.dialects.format import AnswerRules, Bounds, Format
from server.text.dialects.thoughts import Thoughts
from server.text.dialects.tool import ToolSchema, by_schema
from server.text.grammar import Specials, alternatives, marker_rule, or_calls, up_to_marker
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning

CHANNEL, CONSTRAIN, MESSAGE = "<|channel|>", "<|constrain|>", "<|message|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
ANALYSIS = "analysis"  # the channel of thoughts
MARKERS = (CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
HEADER_BEGINNINGS = ("<|", "to=")
MAX_HEADER = 256  # characters of a header; a longer text is content without a header
FUNCTIONS = "functions."


class _Kind(Enum):
    """The kind of a body."""

    CONTENT = auto()
    THOUGHT = auto()
    RAW_THOUGHT = auto()  # passed on as content, with its header and its end
    CALL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmony(Format):
    """The format of gpt-oss."""

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    def thought_bounds(self, thoughts: Thoughts | None, ids_of: Callable[[str], list[int]]) -> Bounds | None:
        """Return the tokens of the header of a thought, and the token that ends a thought, or None if one of these texts is not a single
        token. `thoughts` is not used: the format has no block of thoughts."""
        found = [ids_of(text) for text in (CHANNEL, ANALYSIS, MESSAGE, END)]
        if any(len(ids) != 1 for ids in found):
            return None
        *opening, closing = (ids[0] for ids in found)
        return tuple(opening), closing

    def parser(self, rules: AnswerRules) -> ChannelParser:
        return ChannelParser(frozenset(tool.name for tool in rules.tools), rules.max_calls, splits=rules.splits)

    def forced_calls(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> Constraint:
        return forced_call(tools, specials)

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
        return behind_analysis(constraint, specials, is_call=is_call, calls=calls)


class ChannelParser:
    """Parses an answer that consists of messages in channels. `names`: the offered tools; empty: no calls are parsed. `splits`: thoughts
    are parts of their own."""

    def __init__(self, names: frozenset[str], max_calls: int | None, *, splits: bool) -> None:
        self.num_calls = 0
        self.done = False  # the marker CALL or RETURN has ended the answer, or the allowed number of calls has been made
        self._names = names
        self._max_calls = max_calls
        self._splits = splits
        self._held = ""  # undecided text
        self._kind: _Kind | None = None  # kind of the current body; None: inside a header
        self._is_first = True  # no part of this body was returned yet
        self._has_content = False  # an earlier body had content
        self._arguments = StringEscaper()  # escapes the arguments of the call that is being read

    @property
    def reasons(self) -> bool:
        return self._kind is _Kind.THOUGHT

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while not self.done and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back. A call that was cut off ends here. Drop a cut-off header if it begins with a marker;
        otherwise it is content."""
        held, self._held = ("" if self.done else self._held), ""
        parts: list[Part] = []
        if self._kind is not None:
            self._add(held, parts)
            self._end_call(parts)
        elif held.strip() and not held.lstrip().startswith("<|"):
            self._kind = _Kind.CONTENT
            self._add(held, parts)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Parse one header or one body. Return False if more text is needed."""
        return bool(self._held) and (self._in_header(parts) if self._kind is None else self._in_body(parts))

    def _in_header(self, parts: list[Part]) -> bool:
        """Read a header, or find that a body without a header begins. Return False if more text is needed."""
        beginning = self._held.lstrip()
        at = self._held.find(MESSAGE)
        is_header = any(beginning.startswith(known) or known.startswith(beginning) for known in HEADER_BEGINNINGS)
        if not is_header or at > MAX_HEADER or (at < 0 and len(self._held) >= MAX_HEADER + len(MESSAGE)):
            self._begin(_Kind.CONTENT)
            return True
        if at < 0:
            return False
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        self._read_header(header, parts)
        return True

    def _read_header(self, header: str, parts: list[Part]) -> None:
        """Begin the body after a header. Pass on the beginning of a call. If thoughts are passed on as content, pass on the header of a
        thought, too."""
        channel, recipient = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header), re.search(r"\bto=([^\s<]+)", header)
        name = "" if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        if recipient is not None and self._names and (name in self._names or recipient[1].startswith(FUNCTIONS)):
            self._begin(_Kind.CALL)
            self._arguments = StringEscaper()
            parts.append(CallStart(self.num_calls, new_call_id(), name))
        elif channel is None or channel[1] != ANALYSIS:
            self._begin(_Kind.CONTENT)
        elif self._splits:
            self._begin(_Kind.THOUGHT)
        else:
            self._begin(_Kind.RAW_THOUGHT)
            parts.append(Content(header + MESSAGE))

    def _begin(self, kind: _Kind) -> None:
        """Begin a body of this kind."""
        self._kind = kind
        self._is_first = True

    def _in_body(self, parts: list[Part]) -> bool:
        """Pass on the text of a body, up to its end. Return False if more text is needed."""
        found = [(at, marker) for marker in ENDS if (at := self._held.find(marker)) >= 0]
        if not found:
            keep = len(self._held) - max(overlap(self._held, marker) for marker in ENDS)
            text, self._held = self._held[:keep], self._held[keep:]
            self._add(text, parts)
            return False
        at, marker = min(found)
        self._add(self._held[:at], parts)
        if self._kind is _Kind.RAW_THOUGHT:
            parts.append(Content(marker))
        self._held = self._held[at if marker == START else at + len(marker) :]
        self._end_call(parts)
        self._kind = None
        self.done = self.done or marker in (CALL, RETURN)
        return True

    def _add(self, text: str, parts: list[Part]) -> None:
        """Add text of the present body to `parts`."""
        if not text:
            return
        match self._kind:
            case _Kind.THOUGHT:
                parts.append(Reasoning(text))
            case _Kind.CALL:
                parts.append(CallArguments(self.num_calls, self._arguments.escaped(text)))
            case _Kind.RAW_THOUGHT:
                parts.append(Content(text))
            case _:  # a blank line separates content of different messages
                parts.append(Content(f"\n\n{text}" if self._is_first and self._has_content else text))
                self._has_content = True
        self._is_first = False

    def _end_call(self, parts: list[Part]) -> None:
        """If the body that has ended is a call, count the call. A call without arguments gets an empty object."""
        if self._kind is not _Kind.CALL:
            return
        if self._is_first:
            parts.append(CallArguments(self.num_calls, "{}"))
        self.num_calls += 1
        self.done = self.num_calls == self._max_calls


# --- constraints -------------------------------------------------------------------------------------------------------


def forced_call(tools: Sequence[ToolSchema], specials: Specials) -> Constraint:
    """Return the constraint for one call of any of `tools`. An answer has at most one call, because the model waits for a call's result
    before it makes another call."""
    channel, constrain, message = (marker_rule(marker, specials) for marker in (CHANNEL, CONSTRAIN, MESSAGE))
    found = by_schema(tools)
    rules = [f'start: {channel} "commentary to={FUNCTIONS}" ({alternatives("call", len(found))})']
    for index, (schema, names) in enumerate(found.items()):
        rules += [
            f'call_{index}: /({"|".join(names)})/ " " {constrain} "json" {message} arguments_{index}',
            f"arguments_{index}: %json {schema}",
        ]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def behind_analysis(constraint: Constraint, specials: Specials, *, is_call: bool, calls: Constraint | None = None) -> Constraint:
    """Return a constraint for any number of thoughts, and then an answer that matches `constraint`, or one that matches `calls` if that is
    given. The answer gets the header of the final channel, unless it is a call, whose header is part of `constraint`."""
    channel, message, start = (marker_rule(marker, specials) for marker in (CHANNEL, MESSAGE, START))
    final = "" if is_call else f'{channel} "final" {message} '
    head = [
        f'start: ({channel} "{ANALYSIS}" {message} thought {start} "assistant")* {"" if calls else final}answer',
        up_to_marker("thought", END, specials),
    ]
    framed = msgspec.structs.replace(constraint, head="\n".join(head))
    return framed if calls is None else or_calls(framed, calls, before=final)


FORMAT = Harmony(name="harmony", aliases=("openai", "gpt-oss"), thoughts=())
