"""Write the answer to a conversation in OpenAI's shapes: a stream of chunks, or one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from server.api.answer.generate import Generation, Step, Usage
from server.api.answer.logprobs import LogprobWriter, count_logprobs
from server.api.answer.respond import in_pieces
from server.api.answer.shapes import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from server.api.answer.step_parser import StepParser
from server.api.openai.frame import ChunkFrame, envelope
from server.api.request.conversation import text_of
from server.api.request.prepare import ChatPlan, off_loop
from server.api.request.schema import ChatBody
from server.messages import TokenLogprob
from server.models.model import Loaded, Model
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning

encode = msgspec.json.encode


class _ChatChoice:
    """The state of one choice while it is generated. If the answer is streamed, texts and calls stay empty, and `entries` and `token_ids`
    are only those that no chunk has sent yet."""

    __slots__ = ("arguments", "content", "entries", "finish", "reasoning", "stop_reason", "token_ids", "tool_calls")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[CallStart] = []
        self.arguments: list[list[str]] = []  # pieces of the arguments of each call
        self.entries: list[bytes] = []  # log-probabilities, one JSON object for each token
        self.token_ids: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, parts: Sequence[Part]) -> None:
        """Add parts to the texts and calls of the choice."""
        for part in parts:
            match part:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart():
                    self.tool_calls.append(part)
                    self.arguments.append([])
                case CallArguments(index, text):
                    self.arguments[index].append(text)


class ChatAnswer:
    """An answer of one or more choices, as chunks or as a whole. Chunks and the whole are built from the same parts."""

    def __init__(self, body: ChatBody, plan: ChatPlan, generation: Generation, model: Model, loaded: Loaded) -> None:
        self._body = body
        self._generation = generation
        self._writer = LogprobWriter(loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._choices = [_ChatChoice() for _ in range(plan.job.submit.num_choices)]
        self._parser = StepParser(generation, plan.rules, plan.job.submit.num_choices)
        self._prompt_ids = plan.job.submit.prompt_ids
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._echoed = text_of(body.messages[-1].content) if body.echo else ""
        self._is_of_functions = body.functions is not None  # the answer has `function_call` in place of `tool_calls`
        self._shows_reasoning = body.include_reasoning is not False
        self._envelope = envelope("chat.completion", "chatcmpl", body, model, loaded)

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    async def whole(self) -> list[bytes]:
        """Generate the answer, and return it as pieces of JSON."""
        size = len(self._prompt_ids)
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                choice.add(self._take(choice, step))
                choice.entries += self._writer.chat_entries(step.entries)
                choice.token_ids += step.token_ids
                size += len(step.token_ids) + count_logprobs(step.prompt_logprobs)
        return await off_loop(size, self._pieces)

    def _pieces(self) -> list[bytes]:
        """Return the whole answer as pieces of JSON."""
        answer: ChatCompletion = {**self._envelope, "choices": [], "usage": self.usage.describe()}
        if self._prompt_logprobs:
            answer["prompt_logprobs"] = self._writer.prompt(self._prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        return in_pieces(answer, "choices", (encode(self._describe(index, choice)) for index, choice in enumerate(self._choices)))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer, and yield its chunks as JSON."""
        frame = ChunkFrame({**self._envelope, "object": "chat.completion.chunk"}, self._body, lambda: self.usage)
        head = frame.head
        opened: set[int] = set()
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                parts = self._take(choice, step)
                tail = frame.tail
                if step.choice not in opened:
                    opened.add(step.choice)
                    yield head + await off_loop(count_logprobs(step.prompt_logprobs), lambda step=step: self._opening(step)) + tail
                if self._is_plain(choice, step, parts):
                    for part in parts:  # at most one part; this is the path of nearly every token
                        text = encode(part.text) if isinstance(part, Content) else b'""'
                        yield b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                            head,
                            step.choice,
                            text,
                            tail,
                        )
                elif (chunk := self._chunk(choice, step, parts)) is not None:
                    yield head + chunk + tail
        for chunk in frame.last_chunks:
            yield chunk

    def _take(self, choice: _ChatChoice, step: Step) -> list[Part]:
        """Return the parts that a step adds to its choice. Store the finish reason of the choice and the log-probabilities of the prompt,
        if the step has them."""
        parts, finish = self._parser.parse(step)
        if finish is not None:
            is_call = finish == "tool_calls" and self._is_of_functions
            choice.finish, choice.stop_reason = "function_call" if is_call else finish, step.stop_reason
        if step.prompt_logprobs:
            self._prompt_logprobs = step.prompt_logprobs
        return parts

    def _is_plain(self, choice: _ChatChoice, step: Step, parts: Sequence[Part]) -> bool:
        """Return whether a step adds one text or nothing to the answer, so that its chunk, if any, can be written without `_chunk`."""
        return (
            choice.finish is None
            and not step.entries
            and not self._body.return_token_ids
            and (not parts or (len(parts) == 1 and isinstance(parts[0], Content)))
        )

    def _opening(self, step: Step) -> bytes:
        """Return the entry of `choices` in a choice's first chunk, which has no text of the model yet. `step` is the choice's first
        step."""
        opening: ChatChunkChoice = {
            "index": step.choice,
            "delta": {"role": "assistant", "content": self._echoed},
            "logprobs": None,
            "finish_reason": None,
        }
        if step.prompt_logprobs:
            opening["prompt_logprobs"] = self._writer.prompt(step.prompt_logprobs)
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        return encode(opening)

    def _chunk(self, choice: _ChatChoice, step: Step, parts: Sequence[Part]) -> bytes | None:
        """Return the entry of `choices` in a step's chunk, or None if the step neither changes the message nor ends the choice. If it is
        None, the step's tokens and log-probabilities wait in `choice` for a later chunk."""
        choice.entries += self._writer.chat_entries(step.entries)
        choice.token_ids += step.token_ids
        delta = self._delta(parts)
        if not delta and choice.finish is None:
            return None
        chunk: ChatChunkChoice = {
            "index": step.choice,
            "delta": delta,
            "logprobs": self._writer.chat(choice.entries) if choice.entries else None,
            "finish_reason": choice.finish,
        }
        if choice.finish is not None:
            chunk["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            chunk["token_ids"] = choice.token_ids
        choice.entries, choice.token_ids = [], []
        return encode(chunk)

    def _delta(self, parts: Sequence[Part]) -> ChatDelta:
        """Return what a chunk adds to the message: text, thoughts unless the request leaves them out, and calls. The result is empty if the
        parts add nothing."""
        delta: ChatDelta = {}
        if content := "".join(part.text for part in parts if isinstance(part, Content)):
            delta["content"] = content
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        if reasoning and self._shows_reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        calls: dict[int, ToolCallDelta] = {}
        for part in parts:
            match part:
                case CallStart(index, call_id, name):
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case _:
                    pass
        if calls and self._is_of_functions:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _describe(self, index: int, choice: _ChatChoice) -> ChatChoice:
        """Return a whole choice."""
        calls: list[ToolCall] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
            for call, arguments in zip(choice.tool_calls, choice.arguments, strict=True)
        ]
        content = self._echoed + "".join(choice.content)
        message: ChatMessage = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls and self._is_of_functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        if choice.reasoning and self._shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.reasoning)
        described: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": self._writer.chat(choice.entries) if self._body.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            described["token_ids"] = choice.token_ids
        return described
