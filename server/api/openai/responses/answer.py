"""Write a response of OpenAI's /v1/responses: as events in OpenAI's order, or as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import msgspec

from server.api.answer.blocks import Block, BlockAnswer, Kind
from server.api.answer.generate import Generation, Step
from server.api.answer.logprobs import LogprobWriter
from server.api.openai.responses.body import McpOffer, ResponseBody, ResponseTool
from server.api.openai.responses.input import LOGPROBS, new_id
from server.api.openai.responses.shapes import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
)
from server.api.openai.responses.store import Item
from server.api.request.fields import Foreign
from server.api.request.prepare import ChatPlan
from server.errors import KEY_QUOTA, QUEUE_FULL, ApiError
from server.models.model import Loaded, Model
from server.open_values import created_s

PREFIXES = {Kind.THOUGHT: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
DELTAS = {
    Kind.THOUGHT: "response.reasoning_text.delta",
    Kind.TEXT: "response.output_text.delta",
    Kind.CALL: "response.function_call_arguments.delta",
}
encode = msgspec.json.encode
Keep = Callable[["ResponseAnswer", bytes], None]


class ResponseAnswer(BlockAnswer):
    """An answer as a response object. `keep`, which may store the response, is called with the answer and its JSON when the answer is
    complete, or when `fail` or `end_early` ends it. `keep` is not called if the client leaves, or if an error is raised before anything was
    sent."""

    def __init__(self, body: ResponseBody, plan: ChatPlan, generation: Generation, model: Model, loaded: Loaded, *, keep: Keep) -> None:
        super().__init__(plan, generation)
        self.id = new_id("resp")
        self._body = body
        self._params = plan.job.submit.params
        self._model = body.model or model.spec.name
        self._created_at = int(created_s())
        self._completed_at: int | None = None
        self._status = "queued" if body.background else "in_progress"
        self._fault: ResponseFault | None = None
        self._keep = keep
        self.on_begin: Callable[[], None] = lambda: None  # called when a response that has waited in the background begins
        self._num_events = 0
        self._head = b""  # beginning of the JSON of the open block's delta events, up to the sequence number
        self._tells_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        self._writer = LogprobWriter(loaded.tokenizer, as_ids=False)
        self._logprobs: list[bytes] = []  # log-probabilities of tokens whose text has not been sent yet

    # --- stream -------------------------------------------------------------------------------------------------------

    async def whole(self) -> list[bytes]:
        pieces = await super().whole()
        self._keep(self, b"".join(pieces))
        return pieces

    def failed(self, error: ApiError) -> Sequence[bytes]:
        self.fail(error)
        return (self.lifecycle("response.failed"),)

    def begin(self) -> Sequence[bytes]:
        self._status = "in_progress"
        return self.lifecycle("response.created"), self.lifecycle("response.in_progress")

    def note_begun(self) -> None:
        """If the response has waited in the background, set its status to `in_progress` and call `on_begin`."""
        if self._status == "queued":
            self._status = "in_progress"
            self.on_begin()

    def note_logprobs(self, step: Step) -> None:
        """Keep the log-probabilities of a step for the next text, if the request asks for them."""
        if self._tells_logprobs:
            self._logprobs += self._writer.chat_entries(step.entries)

    def new_id(self, kind: Kind) -> str:
        return new_id(PREFIXES[kind])

    def opened(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been opened: its empty item and, for text and thoughts, the item's empty content.
        Prepare the events by which the block grows."""
        logprobs = ',"logprobs":[]' if block.kind is Kind.TEXT else ""
        content = "" if block.kind is Kind.CALL else f',"content_index":0{logprobs}'
        self.grows_by(block, DELTAS[block.kind], content)
        added = self.event("response.output_item.added", output_index=block.index, item=self.item_of(block, is_open=True))
        if block.kind is Kind.CALL:
            return (added,)
        return added, self._part_event("response.content_part.added", block, _part(block, is_open=True))

    def grows_by(self, block: Block, kind: str, content: str = "") -> None:
        """Prepare the events of type `kind` by which a block grows. `content` is JSON of further fields."""
        head = f'{{"type":"{kind}","item_id":"{block.id}","output_index":{block.index}{content},"sequence_number":'
        self._head = head.encode()

    def grown(self, block: Block, text: str) -> bytes:
        """Return the event for a text that was just added to a block. An event for text has the log-probabilities that have arrived since
        the last event; those of thoughts and calls are dropped."""
        head, number = self._head, self._num_events
        self._num_events = number + 1
        if self._logprobs:
            if block.kind is Kind.TEXT:  # log-probabilities of thoughts and calls are not reported
                block.logprobs += self._logprobs
                head = head.replace(b'"logprobs":[]', b'"logprobs":[' + b",".join(self._logprobs) + b"]", 1)
            self._logprobs = []
        return b'%b%d,"delta":%b}' % (head, number, encode(text))

    def closed(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been closed: its whole text or arguments, for text and thoughts also the item's
        content, and the whole item."""
        where: dict[str, object] = {"item_id": block.id, "output_index": block.index}
        if block.kind is Kind.CALL:
            assert block.call is not None
            told = self.event("response.function_call_arguments.done", **where, name=block.call.name, arguments=block.text)
            return told, self.event("response.output_item.done", output_index=block.index, item=self.item_of(block))
        if block.kind is Kind.TEXT:
            told = self.event("response.output_text.done", **where, content_index=0, text=block.text, logprobs=_raw(block.logprobs))
        else:
            told = self.event("response.reasoning_text.done", **where, content_index=0, text=block.text)
        part = self._part_event("response.content_part.done", block, _part(block))
        return told, part, self.event("response.output_item.done", output_index=block.index, item=self.item_of(block))

    def end(self) -> Sequence[bytes]:
        """Complete the response, call `keep`, and return the events that end a stream."""
        self._complete()
        self._keep(self, self.snapshot())
        return (self.lifecycle(f"response.{self._status}"),)

    # --- whole object -------------------------------------------------------------------------------------------------

    def pieces(self) -> list[bytes]:
        self._complete()
        return [self.snapshot()]

    def fail(self, error: ApiError) -> None:
        """End the response after an error: set its status to `failed`, report the error in it, and call `keep`."""
        code = "rate_limit_exceeded" if error.kind in (QUEUE_FULL, KEY_QUOTA) else "server_error"
        self._fault = {"code": code, "message": error.message}
        self.end_early("failed")

    def end_early(self, status: str) -> None:
        """End the response with this status before its answer is complete, and call `keep`. A block that is still open counts as cut
        off."""
        if self._growing is not None:
            self.blocks[-1].cut_off = True
        self._status = status
        self._keep(self, self.snapshot())

    def snapshot(self) -> bytes:
        """Return the response in its present state as JSON."""
        return encode(self._describe())

    def item_of(self, block: Block, *, is_open: bool = False) -> OutputItem:
        """Return the output item of a block. `is_open`: without the text, as when the block is opened."""
        return _item(block, is_open=is_open)

    @property
    def output(self) -> list[Item]:
        """The output items with their ids, as the store keeps them: without log-probabilities, which no later request needs."""
        return [Item(block.id, encode(self.item_of(replace(block, logprobs=[])))) for block in self.blocks]

    def _complete(self) -> None:
        """Set the status of an answer that has ended: `incomplete` if it ran out of tokens, otherwise `completed`. In the latter case, set
        the time of completion."""
        self._status = "incomplete" if self.finish == "length" else "completed"
        self._completed_at = int(time.time()) if self._status == "completed" else None

    def _describe(self) -> ResponseObject:
        """Return the response in its present state."""
        body = self._body
        text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
        choice = body.tool_choice
        tools = [_described(tool) for tool in body.tools or () if not isinstance(tool, Foreign)]
        has_ended = self._status in ("completed", "incomplete", "failed", "cancelled")
        described: ResponseObject = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._fault,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self._model,
            "output": [self.item_of(block) for block in self.blocks],
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": body.truncation or "disabled",
        }
        # OpenAI's API description allows no null for these fields.
        if has_ended:
            described["usage"] = self._usage()
        if body.prompt_cache_key is not None:
            described["prompt_cache_key"] = body.prompt_cache_key
        if body.safety_identifier is not None:
            described["safety_identifier"] = body.safety_identifier
        if body.user is not None:
            described["user"] = body.user
        return described

    def _usage(self) -> ResponseUsage:
        """Return the counts in the shape of a response."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # --- events -------------------------------------------------------------------------------------------------------

    def lifecycle(self, kind: str) -> bytes:
        """Return an event that has the whole response."""
        return self.event(kind, response=self._describe())

    def _part_event(self, kind: str, block: Block, part: OutputText | ReasoningText) -> bytes:
        """Return an event about the content of a block."""
        return self.event(kind, item_id=block.id, output_index=block.index, content_index=0, part=part)

    def event(self, kind: str, **fields: object) -> bytes:
        """Return the next event, with its number, and count it."""
        event = encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return event


def _described(tool: ResponseTool | McpOffer) -> dict[str, object]:
    """Return a tool of the request as the answer shows it. The credentials for an MCP server are left out."""
    if isinstance(tool, McpOffer):
        return {**tool.model_dump(exclude_unset=True, exclude={"authorization"}), "headers": None}
    return {"parameters": None, "strict": None, **tool.model_dump(exclude_unset=True)}


def _raw(parts: Sequence[bytes]) -> msgspec.Raw:
    """Return a list of encoded items as JSON."""
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _part(block: Block, *, is_open: bool = False) -> OutputText | ReasoningText:
    """Return the content of a block of text or thoughts. `is_open`: without the text, as when the block is opened."""
    text = "" if is_open else block.text
    if block.kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    logprobs = cast("Sequence", _raw(() if is_open else block.logprobs))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item(block: Block, *, is_open: bool = False) -> OutputItem:
    """Return the output item of a block. `is_open`: without the text or arguments, as when the block is opened."""
    status = "in_progress" if is_open else "incomplete" if block.cut_off else "completed"
    match block.kind:
        case Kind.THOUGHT:
            thoughts = () if is_open else (cast("ReasoningText", _part(block)),)
            reasoning: ReasoningItem = {"type": "reasoning", "id": block.id, "summary": [], "content": thoughts, "status": status}
            return reasoning
        case Kind.TEXT:
            texts = () if is_open else (cast("OutputText", _part(block)),)
            message: MessageItem = {"type": "message", "id": block.id, "role": "assistant", "status": status, "content": texts}
            return message
        case Kind.CALL:
            assert block.call is not None
            call: FunctionCallItem = {
                "type": "function_call",
                "id": block.id,
                "call_id": block.call.id,
                "name": block.call.name,
                "arguments": "" if is_open else block.text,
                "status": status,
            }
            return call
