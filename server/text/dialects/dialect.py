"""A model's dialect: the format in which it writes calls and thoughts, with the ids of the markers in its vocabulary, and how it reads
fill-in-the-middle prompts. The dialect is detected when the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.interfaces import Tokenizer
from server.messages import Constraint, Trigger
from server.text.dialects.calls.plain_calls import PlainCalls
from server.text.dialects.detect import detected, reads_effort, shows_system, shows_tools, usable
from server.text.dialects.format import AnswerRules, Bounds, Format
from server.text.dialects.registry import FORMATS
from server.text.dialects.round_trip import fault_of
from server.text.dialects.thoughts import Thoughts
from server.text.dialects.tool import ToolSchema
from server.text.infill import Infill


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes its answers."""

    format: Format
    thoughts: Thoughts | None  # None: the format has no block of thoughts
    thinks: bool  # answers may contain thoughts
    shown: Mapping[int, bytes]  # markers that are single tokens, by id: the parser gets their text even if they are special tokens
    infill: Infill | None = None
    plain_calls: PlainCalls | None = None  # beginnings of calls in plain JSON; None: such calls are not expected
    thought_bounds: Bounds | None = None  # the tokens around thoughts; None: no such tokens are known, so thoughts have no budget
    reads_effort: bool = False  # the chat template tells the model the reasoning effort of a request
    reads_tools: bool = True  # the chat template shows the model the tools of a request
    writes_calls: bool = True  # the chat template writes the calls of earlier turns
    has_system: bool = True  # the chat template writes a system message; true without an examination if the template shows tools
    has_system_with_audio: bool = True  # the chat template writes a system message also in a conversation with audio
    history_fault: str = ""  # how the template's text of earlier calls differs from what the model wrote; "": it does not

    @property
    def notes(self) -> list[str]:
        """Notes for the log, if the chat template shows no tools, or writes earlier calls differently from the model."""
        if not self.reads_tools:
            return ["its chat template shows no tools: the first message describes them as text, and calls are read as JSON"]
        if self.history_fault:
            return [
                f"its chat template writes earlier answers with calls differently from the model: {self.history_fault}; "
                "prompts are computed again from the first token that differs"
            ]
        return []

    @property
    def specials(self) -> dict[str, int]:
        """The ids of markers that are single tokens, by the marker's text."""
        return {text.decode(): token_id for token_id, text in self.shown.items()}

    @property
    def thought_ids(self) -> tuple[int, int] | None:
        """The tokens that open and close a block of thoughts, or None if there are none."""
        return None if self.thoughts is None else self.thoughts.ids(self.specials)

    def is_thinking(self, prompt: str, continued: str = "") -> bool:
        """Return whether a prompt ends with the opening of a block of thoughts, or inside such a block. `continued` is the message that the
        answer continues, which may begin with a block."""
        return self.thoughts is not None and (self.thoughts.are_open(prompt) or self.thoughts.are_begun(continued))

    def rules(
        self,
        tools: Sequence[ToolSchema] = (),
        max_calls: int | None = None,
        *,
        demanded: bool = False,
        thinking: bool = False,
        split_reasoning: bool = True,
    ) -> AnswerRules:
        """Return how an answer is parsed. `tools`: the tools whose calls are parsed; empty: no calls are parsed. `max_calls`: the most
        calls that are parsed; None: any number. `demanded`: the answer must be calls. `thinking`: the prompt has opened a block of
        thoughts. `split_reasoning`: thoughts become parts of their own, otherwise they are content."""
        splits = split_reasoning and (self.thinks or thinking)
        return AnswerRules(self.format, self.thoughts, thinking, splits, tools, max_calls, demanded)

    def forced_calls(self, tools: Sequence[ToolSchema], *, several: bool) -> Constraint:
        """Return the constraint for one call of any of `tools`. If `several`, and if the model's format has several calls in one answer,
        allow more calls."""
        return self.format.forced_calls(tools, self.specials, several=several)

    def framed(self, constraint: Constraint, *, thinking: bool, is_call: bool, calls: Constraint | None = None) -> Constraint:
        """Return `constraint` preceded by the thoughts that the model may write, or is already writing (`thinking`). `is_call`:
        `constraint` describes calls. `calls`: the constraint for calls that the model may write instead of the answer; None: there are no
        such calls."""
        thoughts = self.thoughts if thinking or self.thinks else None
        return self.format.framed(constraint, self.specials, thoughts, thinking=thinking, is_call=is_call, calls=calls)

    @property
    def announces_calls(self) -> bool:
        """Whether each call begins with a marker, so that the first token distinguishes a call from an answer in JSON."""
        calls = self.format.call_syntax
        return calls is None or (calls.announces and not calls.bare)

    def trigger(self, names: Sequence[str], tokenizer: Tokenizer, *, splits: bool, thinking: bool) -> Trigger | None:
        """Return the trigger for calls of the tools `names`: the token that opens all calls, with the tokens that may follow it, and the
        beginnings of calls in plain JSON. Return None if there is neither such a token nor such a beginning, if the format has no call
        syntax (harmony), or if thoughts are separated from the answer (`splits`) and no special tokens mark them."""
        calls, specials, thought_ids = self.format.call_syntax, self.specials, self.thought_ids if splits else None
        if calls is None or (splits and thought_ids is None):
            return None
        opening_id = None if calls.bare else specials.get(calls.opening)
        plain = () if self.plain_calls is None else self.plain_calls.beginnings(names)
        if opening_id is None and not plain:
            return None
        # The texts are encoded together with the opening token, because some tokenizers encode the beginning of a text differently.
        texts = [] if opening_id is None else [calls.opening + text for name in names for text in calls.beginnings(name)]
        encoded = [tuple(tokenizer.encode(text, False)) for text in texts]
        offers = tuple(dict.fromkeys(ids[1:] for ids in encoded if ids[0] == opening_id))
        return Trigger(opening_id, offers, *(thought_ids or (None, None)), is_open=thought_ids is not None and thinking, plain=plain)

    def behind_trigger(self, tools: Sequence[ToolSchema], *, several: bool) -> str:
        """Return the grammar of calls of `tools` after the token that opens them."""
        assert self.format.call_syntax is not None, "a dialect without such calls has no trigger"
        return "\n".join(["start: inside", *self.format.call_syntax.inside(tools, self.specials, several=several)])

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_parser: str | None, thinks: bool | None) -> Dialect:
        """Return the dialect of a model. The settings `tool_parser` and `thinks` win if they are not None. Otherwise `detected` finds the
        format, and the model thinks if the format has no block of thoughts (harmony) or the vocabulary has tokens for the markers of such a
        block. Raise ValueError if the setting `tool_parser` names no format, and TemplateUnavailable if no process could render the
        template."""
        if tool_parser is not None and tool_parser not in FORMATS:
            raise ValueError(f"tool parser {tool_parser!r} is unknown; known are: {', '.join(FORMATS)}")
        template = usable(tokenizer.chat_template)
        written, writes_calls = detected(tokenizer, template)
        form = written if tool_parser is None else FORMATS[tool_parser]

        def ids_of(marker: str) -> list[int]:
            return tokenizer.encode(marker, False)

        in_vocabulary = [one for one in form.thoughts if one.in_vocabulary(ids_of)]
        thoughts = next(iter([*in_vocabulary, *form.thoughts]), None)
        reads_tools = shows_tools(template)
        markers = [*form.markers, *((thoughts.opening, thoughts.closing) if thoughts else ())]
        return cls(
            form,
            thoughts,
            bool(in_vocabulary) or thoughts is None if thinks is None else thinks,
            _single_tokens(tokenizer, markers),
            Infill.of(tokenizer),
            PlainCalls(tokenizer),
            form.thought_bounds(thoughts, ids_of),
            reads_effort(template),
            reads_tools,
            writes_calls,
            reads_tools or shows_system(template),
            shows_system(template, [{"type": "audio"}]),
            fault_of(tokenizer) if writes_calls else "",
        )


def _single_tokens(tokenizer: Tokenizer, markers: Sequence[str]) -> dict[int, bytes]:
    """Return the markers that are single tokens, by id, even if they are not declared special, as in Qwen's vocabulary: a grammar that
    spells the bytes of such a marker would never match the token that the model writes."""
    encoded = ((marker, tokenizer.encode(marker, False)) for marker in markers)
    return {ids[0]: marker.encode() for marker, ids in encoded if len(ids) == 1}
