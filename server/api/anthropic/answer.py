"""Write an answer in Anthropic's shape: as the events of a message, or as a whole message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, cast

import msgspec
from typing_extensions import TypedDict

from server.api.answer.blocks import Block, BlockAnswer, Kind
from server.api.answer.generate import Generation
from server.api.request.prepare import ChatPlan
from server.open_values import new_hex
from server.text.parts import CallStart

# --- shapes -----------------------------------------------------------------------------------------------------------


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Mapping[str, Any]


class OutputDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """The token counts of a message. `input_tokens` excludes tokens found in the prefix cache, and `output_tokens` includes thoughts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class AnthropicAnswer(TypedDict):
    """A message. At the beginning of a stream, the message has no content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class EndDelta(TypedDict):
    """Why a message has ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageEvent(TypedDict):
    """An event of a stream. `type` decides which of the other fields the event has."""

    type: str
    message: NotRequired[AnthropicAnswer]
    index: NotRequired[int]
    content_block: NotRequired[TextBlock | ThinkingBlock | ToolUseBlock]
    delta: NotRequired[TextDelta | ThinkingDelta | SignatureDelta | InputDelta | EndDelta]
    usage: NotRequired[MessageUsage]


# --- the answer -------------------------------------------------------------------------------------------------------

DELTAS = {
    Kind.TEXT: b'{"type":"text_delta","text":',
    Kind.THOUGHT: b'{"type":"thinking_delta","thinking":',
    Kind.CALL: b'{"type":"input_json_delta","partial_json":',
}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
encode = msgspec.json.encode


class MessageAnswer(BlockAnswer):
    """An answer of Anthropic's API. `is_capped`: the context leaves room for fewer tokens than the request's max_tokens. `is_empty`: the
    request's max_tokens is 0, so the token that was sampled is left out. `omits_thoughts`: blocks of thoughts have no text. `has_stops`:
    the request has stop_sequences; otherwise, the stop strings are the model's defaults, and the answer does not name the stop string that
    ended it."""

    def __init__(
        self,
        plan: ChatPlan,
        generation: Generation,
        model: str,
        *,
        is_capped: bool,
        is_empty: bool,
        omits_thoughts: bool,
        has_stops: bool,
    ) -> None:
        super().__init__(plan, generation)
        self._id = self.new_id(Kind.TEXT)
        self._model = model
        self._is_capped = is_capped
        self._is_empty = is_empty
        self._omits_thoughts = omits_thoughts
        self._has_stops = has_stops
        self._head = b""  # JSON that precedes the text in every delta of the open block

    def new_id(self, kind: Kind) -> str:
        return f"msg_{new_hex('msg', 12)}"

    def begin(self) -> Sequence[bytes]:
        return (encode({"type": "message_start", "message": self._describe()}),)

    def opened(self, block: Block) -> Sequence[bytes]:
        self._head = b'{"type":"content_block_delta","index":%d,"delta":%b' % (block.index, DELTAS[block.kind])
        return (
            encode({"type": "content_block_start", "index": block.index, "content_block": _block(block, has_text=False, is_open=True)}),
        )

    def grown(self, block: Block, text: str) -> bytes:
        return b"" if self._is_omitted(block) else self._head + encode(text) + b"}}"

    def closed(self, block: Block) -> Sequence[bytes]:
        stop = encode({"type": "content_block_stop", "index": block.index})
        if block.kind is not Kind.THOUGHT:
            return (stop,)
        signature: SignatureDelta = {"type": "signature_delta", "signature": block.id}
        return encode({"type": "content_block_delta", "index": block.index, "delta": signature}), stop

    def end(self) -> Sequence[bytes]:
        reason, sequence = self._ended
        delta: EndDelta = {"stop_reason": reason, "stop_sequence": sequence}
        return encode({"type": "message_delta", "delta": delta, "usage": self._usage()}), b'{"type":"message_stop"}'

    def pieces(self) -> list[bytes]:
        shown = () if self._is_empty else self.blocks
        return [encode({**self._describe(), "content": [_block(block, has_text=not self._is_omitted(block)) for block in shown]})]

    def _is_omitted(self, block: Block) -> bool:
        """Return whether the text of a block is left out."""
        return self._omits_thoughts and block.kind is Kind.THOUGHT

    @property
    def _ended(self) -> tuple[str | None, str | None]:
        """The stop reason, and the client's stop string that caused it."""
        if self._is_empty:
            return "max_tokens", None
        if self.finish == "stop" and isinstance(self.stop_reason, str) and self._has_stops:
            return "stop_sequence", self.stop_reason
        if self.finish == "length" and self._is_capped:
            return "model_context_window_exceeded", None
        return STOP_REASONS.get(self.finish or ""), None

    def _describe(self) -> AnthropicAnswer:
        """Return the message without its content."""
        reason, sequence = self._ended
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> MessageUsage:
        """Return the token counts in Anthropic's shape."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": 0 if self._is_empty else usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": 0 if self._is_empty else usage.reasoning_tokens},
        }


def _block(block: Block, *, has_text: bool, is_open: bool = False) -> TextBlock | ThinkingBlock | ToolUseBlock:
    """Return a block in Anthropic's shape. Without `has_text`, leave out the text of a text block or a thought. With `is_open`, leave out
    what the beginning of a block lacks: the signature of a thought and the arguments of a call."""
    text = block.text if has_text else ""
    match block.kind:
        case Kind.TEXT:
            return {"type": "text", "text": text}
        case Kind.THOUGHT:
            return {"type": "thinking", "thinking": text, "signature": "" if is_open else block.id}
        case Kind.CALL:
            call = cast("CallStart", block.call)
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": {} if is_open else block.arguments}
