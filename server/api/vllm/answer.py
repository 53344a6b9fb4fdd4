"""Write the answer of `/inference/v1/generate`: tokens without text, as a stream of chunks or as one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NotRequired

import msgspec
from typing_extensions import TypedDict

from server.api.answer.generate import Generation, Step
from server.api.answer.logprobs import LogprobWriter, count_logprobs
from server.api.answer.respond import in_pieces
from server.api.answer.shapes import ChatLogprobs, Envelope, PromptLogprobs, UsageCounts
from server.api.openai.frame import ChunkFrame, envelope
from server.api.request.prepare import off_loop
from server.api.request.schema import CompletionBody
from server.messages import TokenLogprob
from server.models.model import Loaded, Model

encode = msgspec.json.encode


class TokensChoice(TypedDict):
    """The tokens of a choice, or a part of them."""

    index: int
    token_ids: Sequence[int]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]  # the stop string or stop token that has ended the choice; only in its last part
    prompt_logprobs: NotRequired[PromptLogprobs]  # only in a stream; a whole answer has them beside its choices


class TokensEnvelope(Envelope):
    """The fields around the choices."""

    request_id: str


class GeneratedTokens(TokensEnvelope):
    """A whole answer."""

    choices: Sequence[TokensChoice]
    usage: UsageCounts
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None  # always null: vLLM's transfer of the KV cache is not implemented


class TokensChunk(TokensEnvelope):
    """A chunk of a stream."""

    choices: Sequence[TokensChoice]
    usage: NotRequired[UsageCounts | None]


@dataclass(slots=True)
class _Choice:
    """The state of one choice while it is generated."""

    index: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[bytes] = field(default_factory=list[bytes])
    finish: str | None = None
    stop_reason: str | int | None = None


class TokensAnswer:
    """An answer of one or more choices, as chunks or as a whole."""

    def __init__(self, body: CompletionBody, generation: Generation, num_choices: int, model: Model, loaded: Loaded) -> None:
        """`body` is the request, converted to a completion."""
        self._body = body
        self._generation = generation
        self._choices = [_Choice(index) for index in range(num_choices)]
        self._writer = LogprobWriter(loaded.tokenizer, as_ids=True)
        named = envelope("generate.tokens", "gen", body, model, loaded)
        self._envelope: TokensEnvelope = {**named, "request_id": body.request_id or named["id"]}

    async def whole(self) -> list[bytes]:
        """Generate the answer, and return it as pieces of JSON."""
        read: tuple[TokenLogprob | None, ...] = ()
        size = 0
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                choice.token_ids += step.token_ids
                choice.logprobs += self._written(step)
                choice.finish, choice.stop_reason = step.finish, step.stop_reason
                read = read or step.prompt_logprobs
                size += len(step.token_ids) + count_logprobs(step.prompt_logprobs)
        return await off_loop(size, lambda: self._pieces(read))

    def _pieces(self, read: Sequence[TokenLogprob | None]) -> list[bytes]:
        """Return the whole answer as pieces of JSON. `read` has the log-probabilities of the prompt."""
        answer: GeneratedTokens = {
            **self._envelope,
            "choices": [],
            "usage": self._generation.usage.describe(),
            "prompt_logprobs": None if self._body.prompt_logprobs is None else self._writer.prompt(read),
            "kv_transfer_params": None,
        }
        described = (self._describe(one.index, one.token_ids, one.logprobs, one.finish, one.stop_reason) for one in self._choices)
        return in_pieces(answer, "choices", map(encode, described))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer, and yield its chunks as JSON."""
        frame = ChunkFrame(self._envelope, self._body, lambda: self._generation.usage)
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                if step.token_ids or step.finish is not None or step.prompt_logprobs:
                    yield (
                        frame.head + await off_loop(count_logprobs(step.prompt_logprobs), lambda step=step: self._chunk(step)) + frame.tail
                    )
        for chunk in frame.last_chunks:
            yield chunk

    def _chunk(self, step: Step) -> bytes:
        """Return the choice of a step's chunk."""
        chunk = self._describe(step.choice, step.token_ids, self._written(step), step.finish, step.stop_reason)
        if step.prompt_logprobs:
            chunk["prompt_logprobs"] = self._writer.prompt(step.prompt_logprobs)
        return encode(chunk)

    def _written(self, step: Step) -> list[bytes]:
        """Return the log-probabilities of a step, encoded as JSON token by token, or an empty list if they are not requested."""
        return self._writer.chat_entries(step.entries) if self._body.logprobs is not None else []

    def _describe(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[bytes], finish: str | None, stop_reason: str | int | None
    ) -> TokensChoice:
        """Return a choice, or a part of it. `finish` is None for a part that does not end the choice."""
        choice: TokensChoice = {
            "index": index,
            "token_ids": token_ids,
            "logprobs": None if self._body.logprobs is None else self._writer.chat(logprobs),
            "finish_reason": finish,
        }
        if finish is not None:
            choice["stop_reason"] = stop_reason
        return choice
