"""A model's dialect: how it writes tool calls, thoughts and fill-in-the-middle prompts. It is detected when the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.interfaces import ChatTemplate, Tokenizer
from server.messages import Constraint
from server.text import harmony, reasoning
from server.text.grammar import ToolSchema, behind_thoughts, forced_calls
from server.text.infill import Infill
from server.text.templates.meter import Limits
from server.text.tools import FORMATS, GENERIC, HARMONY, ToolFormat

PROBE = Limits(time_s=0.25, memory_bytes=16 << 20)  # for the rendering that detects the format: a thousand times the usual cost


@dataclass(frozen=True, slots=True)
class Dialect:
    tools: ToolFormat
    thinks: bool
    shown: Mapping[int, bytes]  # markers that are single tokens, by id: a parser needs their text even if they are special tokens
    infill: Infill | None = None
    reads_tools: bool = True  # the chat template shows the model the tools of a request

    @property
    def specials(self) -> dict[str, int]:
        """The ids of markers that are single tokens, by the marker's text."""
        return {text.decode(): token_id for token_id, text in self.shown.items()}

    @property
    def has_channels(self) -> bool:
        """True if thoughts, calls and content are separate messages, as in the harmony format."""
        return self.tools is HARMONY

    def forced_calls(self, tools: Sequence[ToolSchema], *, several: bool) -> Constraint:
        """Return the constraint for one call of any of `tools`. If `several`, and if the model's format has several calls in one answer,
        allow more calls."""
        if self.has_channels:
            return harmony.forced_call(tools, self.specials)
        return forced_calls(self.tools, tools, self.specials, several=several)

    def framed(self, constraint: Constraint, *, thinking: bool, is_call: bool) -> Constraint:
        """Return `constraint` preceded by a think block, which the model may write or is already writing (`thinking`)."""
        if self.has_channels:
            return harmony.behind_analysis(constraint, self.specials, is_call=is_call)
        return behind_thoughts(constraint, self.specials, open_already=thinking) if thinking or self.thinks else constraint

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_parser: str | None, thinks: bool | None) -> Dialect:
        """Return the dialect of a model. Explicit settings win. Otherwise the format is the one in which the chat template writes a
        tool call, and the model has think blocks if its vocabulary has tokens for them."""
        if tool_parser is None:
            tools = _written_by(tokenizer.chat_template)
        elif tool_parser in FORMATS:
            tools = FORMATS[tool_parser]
        else:
            raise ValueError(f"tool parser {tool_parser!r} is unknown; known are: {', '.join(FORMATS)}")
        if thinks is None:
            thinks = tools is HARMONY or all(len(tokenizer.encode(marker, False)) == 1 for marker in (reasoning.OPEN, reasoning.CLOSE))
        markers = (*tools.markers, tools.arguments_marker, reasoning.OPEN, reasoning.CLOSE)
        if tools is HARMONY:
            markers = harmony.MARKERS
        reads_tools = _shows_tools(tokenizer.chat_template)
        return cls(tools, thinks, _single_tokens(tokenizer, markers), Infill.of(tokenizer), reads_tools)


def _written_by(template: ChatTemplate | None) -> ToolFormat:
    """Return the format whose marker appears when the template renders a tool call in an earlier message."""
    if template is None:
        return GENERIC
    call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}
    conversation: list[dict[str, object]] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tool: dict[str, object] = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
    try:
        text = template.render(conversation, tools=[tool], add_generation_prompt=False, limits=PROBE)
    except Exception:  # a template may raise any exception; a template that refuses calls writes none
        return GENERIC
    return next((f for f in FORMATS.values() if any(sign in text for sign in f.signs)), GENERIC)


def _shows_tools(template: ChatTemplate | None) -> bool:
    """Return whether a prompt contains the tools of its request."""
    name = "probe_of_tools"
    tool: dict[str, object] = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    try:
        return template is not None and name in template.render([{"role": "user", "content": "probe"}], tools=[tool], limits=PROBE)
    except Exception:  # a template may raise any exception
        return False


def _single_tokens(tokenizer: Tokenizer, markers: tuple[str, ...]) -> dict[int, bytes]:
    """Return the markers that are single tokens, by id, even if they are not declared special, as in Qwen's vocabulary: a grammar that
    spells the bytes of such a marker would never match the token that the model writes."""
    encoded = ((marker, tokenizer.encode(marker, False)) for marker in markers)
    return {ids[0]: marker.encode() for marker, ids in encoded if len(ids) == 1}
