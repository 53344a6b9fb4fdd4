"""Write an answer in Ollama's shape: a line of JSON for each part, or one object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, NotRequired, cast

import msgspec
from typing_extensions import TypedDict

from server.api.answer.blocks import Block, BlockAnswer, Kind
from server.api.answer.generate import Generation, Step
from server.api.answer.logprobs import LogprobWriter
from server.api.answer.shapes import RankedChatToken
from server.api.request.prepare import ChatPlan
from server.models.model import Loaded, rfc3339
from server.open_values import created_s
from server.text.dialects.calls.characters import ends_early
from server.text.parts import CallStart

encode = msgspec.json.encode


class OllamaFunction(TypedDict):
    """The function that a call names."""

    index: int
    name: str
    arguments: Mapping[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaFunction


class OllamaSaid(TypedDict):
    """The message of an answer, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[Sequence[OllamaToolCall]]


class OllamaCounts(TypedDict, total=False):
    """The counts and durations in the last line of an answer. Durations are in nanoseconds."""

    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class OllamaChat(OllamaCounts):
    """A line of the answer to /api/chat, or the whole answer."""

    model: str
    created_at: str
    message: OllamaSaid
    logprobs: NotRequired[Sequence[RankedChatToken]]
    done: bool


class OllamaGenerated(OllamaCounts):
    """A line of the answer to /api/generate, or the whole answer."""

    model: str
    created_at: str
    response: str
    thinking: NotRequired[str]
    logprobs: NotRequired[Sequence[RankedChatToken]]
    done: bool


class OllamaAnswer(BlockAnswer):
    """An answer to a chat (`is_chat`) or to a prompt."""

    def __init__(
        self,
        plan: ChatPlan,
        generation: Generation,
        loaded: Loaded,
        model: str,
        *,
        is_chat: bool,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """`ended` is called once the answer is complete, has failed, or is no longer wanted."""
        super().__init__(plan, generation)
        self._ended = ended
        self._worker = loaded.worker
        self._writer = None if plan.job.submit.params.logprobs is None else LogprobWriter(loaded.tokenizer, as_ids=False)
        self._logprobs: list[bytes] = []  # log-probabilities of all tokens so far
        self._num_told = 0  # number of entries of `_logprobs` that earlier lines of the stream have sent
        self._is_chat = is_chat
        self._model = model
        self._began_s = time.monotonic()
        self._head = encode({"model": model, "created_at": now()})[:-1]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the answer. A tool call becomes one line when it is complete."""
        try:
            async with aclosing(super().chunks()) as lines:
                async for line in lines:
                    yield line
        finally:
            self._end()

    async def whole(self) -> list[bytes]:
        try:
            return await super().whole()
        finally:
            self._end()

    def _end(self) -> None:
        """Call `ended`, if it was given."""
        if self._ended is not None:
            self._ended()

    def note_logprobs(self, step: Step) -> None:
        if self._writer is not None:
            self._logprobs += self._writer.chat_entries(step.entries)

    def new_id(self, kind: Kind) -> str:
        return ""

    def begin(self) -> Sequence[bytes]:
        return ()

    def opened(self, block: Block) -> Sequence[bytes]:
        return ()

    def grown(self, block: Block, text: str) -> bytes:
        match block.kind:
            case Kind.TEXT:
                return self._line(b'"message":{"role":"assistant","content":%b}' if self._is_chat else b'"response":%b', text)
            case Kind.THOUGHT:
                thought = b'"message":{"role":"assistant","content":"","thinking":%b}' if self._is_chat else b'"response":"","thinking":%b'
                return self._line(thought, text)
            case Kind.CALL:
                return b""

    def closed(self, block: Block) -> Sequence[bytes]:
        if block.kind is not Kind.CALL or not self._is_chat or ends_early(block.text):
            return ()
        said: OllamaSaid = {"role": "assistant", "content": "", "tool_calls": self._calls([block])}
        return (b'%b,"message":%b,"done":false}' % (self._head, encode(said)),)

    def end(self) -> Sequence[bytes]:
        empty = b'"message":{"role":"assistant","content":""}' if self._is_chat else b'"response":""'
        return (b'%b,%b%b,"done":true,%b' % (self._head, empty, self._told_logprobs(), encode(self._counts())[1:]),)

    def pieces(self) -> list[bytes]:
        texts = {kind: "".join(block.text for block in self.blocks if block.kind is kind) for kind in Kind}
        calls = self._calls([block for block in self.blocks if block.kind is Kind.CALL and not ends_early(block.text)])
        thinking = {"thinking": texts[Kind.THOUGHT]} if texts[Kind.THOUGHT] else {}
        if self._is_chat:
            further = {"tool_calls": calls} if calls else {}
            said: dict[str, object] = {"message": {"role": "assistant", "content": texts[Kind.TEXT], **thinking, **further}}
        else:
            said = {"response": texts[Kind.TEXT], **thinking}
        # `grown` has built lines and counted their log-probabilities as sent, but no line was sent: the whole answer has those of all
        # tokens
        self._num_told = 0
        return [self._head, self._told_logprobs(), b",", encode({**said, "done": True, **self._counts()})[1:]]

    def _line(self, form: bytes, text: str) -> bytes:
        """Return a line of the stream. `form` is JSON with a place for the text."""
        return b'%b,%b%b,"done":false}' % (self._head, form % encode(text), self._told_logprobs())

    def _told_logprobs(self) -> bytes:
        """Return the field with the log-probabilities since the last line, or b"" if there are none. These log-probabilities then count as
        sent."""
        new, self._num_told = self._logprobs[self._num_told :], len(self._logprobs)
        return b',"logprobs":[%b]' % b",".join(new) if new else b""

    def _calls(self, blocks: Sequence[Block]) -> list[OllamaToolCall]:
        """Return blocks of calls in Ollama's shape."""
        made: list[OllamaToolCall] = []
        for block in blocks:
            call = cast("CallStart", block.call)
            function: OllamaFunction = {"index": call.index, "name": call.name, "arguments": block.arguments}
            made.append({"id": call.id, "function": function})
        return made

    def _counts(self) -> OllamaCounts:
        """Return the counts and durations of the answer."""
        now_s = time.monotonic()
        first_s = now_s if self._generation.first_s is None else self._generation.first_s
        load_s = max(0.0, min(self._worker.ready_s, first_s) - self._began_s)  # time that the answer waited until the worker was ready
        return {
            "done_reason": "length" if self.finish == "length" else "stop",
            "total_duration": _nanoseconds(now_s - self._began_s),
            "load_duration": round(load_s * 1e9),
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - self._began_s - load_s),
            "eval_count": self.usage.completion_tokens,
            "eval_duration": _nanoseconds(now_s - first_s),
        }


def _nanoseconds(spent_s: float) -> int:
    """Return a duration in nanoseconds, at least 1, because clients divide by it."""
    return max(1, round(spent_s * 1e9))


def now() -> str:
    """Return the time at which the answer was created, as Ollama writes it."""
    return rfc3339(created_s())
