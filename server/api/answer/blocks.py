"""Build an answer as a sequence of blocks: thoughts, text and calls. Each block opens, grows and closes before the next one opens.
Subclasses encode the events, for example in the shapes of OpenAI's responses or Anthropic's messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from server.api.answer.generate import Generation, Step, Usage
from server.api.answer.step_parser import StepParser
from server.api.request.prepare import ChatPlan, off_loop
from server.errors import ApiError
from server.text.dialects.calls.characters import object_of
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning


class Kind(Enum):
    """The kind of a block."""

    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """A part of an answer: a thought, a text, or a call."""

    index: int  # among the blocks of the answer
    kind: Kind
    id: str
    call: CallStart | None = None  # the tool and the id of a call; None: the block is no call
    pieces: list[str] = field(default_factory=list[str])  # pieces of `text`
    logprobs: list[bytes] = field(default_factory=list[bytes])  # log-probabilities, encoded as JSON
    cut_off: bool = False  # the answer ended before this block was complete: its tokens ran out, or a stop string came within a call

    @property
    def text(self) -> str:
        """The text of the block. A call's text is its arguments."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of a call as an object. If they are no valid JSON object, for example because the call was cut off, the object is
        empty."""
        return object_of(self.text) or {}


class BlockAnswer(ABC):
    """An answer that is sent as events or as a whole; either way it is built from the same blocks. An event is a JSON text. An empty text
    stands for no event, and is not sent."""

    def __init__(self, plan: ChatPlan, generation: Generation) -> None:
        """`plan` has the rules for parsing the text that `generation` generates."""
        self.blocks: list[Block] = []
        self.finish: str | None = None  # why the answer has ended: stop, length or tool_calls; None: it has not ended
        self.stop_reason: str | int | None = None  # the stop string or the id of the stop token that has ended the answer, if one has
        self._generation = generation
        self._parser = StepParser(generation, plan.rules)
        self._growing: type[Part] | None = None  # type of the parts that extend the last block; None once it is closed

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    async def whole(self) -> list[bytes]:
        """Generate the answer, and return it as pieces of JSON."""
        size, begun = 0, False
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                if not begun:
                    begun = True
                    self.note_begun()
                self._take(step)
                size += len(step.token_ids)
        return await off_loop(size, self.pieces)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer, and yield its events. Errors before the first event are raised; `failed` encodes later ones."""
        begun = False
        try:
            async with aclosing(self._generation.steps()) as steps:
                async for step in steps:
                    if not begun:
                        begun = True
                        for event in self.begin():
                            yield event
                    for event in self._take(step):
                        if event:
                            yield event
            ending = self.end()
        except ApiError as error:
            if not begun:
                raise  # no event was sent, so the error can still decide the HTTP status
            ending = self.failed(error)
        for event in ending:
            yield event

    def _take(self, step: Step) -> Sequence[bytes]:
        """Add a step to the blocks. Return the events that report the change."""
        parts, finish = self._parser.parse(step)
        if step.entries:
            self.note_logprobs(step)
        if finish is None and len(parts) == 1 and type(part := parts[0]) is self._growing and not isinstance(part, CallStart):
            self.blocks[-1].pieces.append(part.text)  # nearly every token takes this path
            return (self.grown(self.blocks[-1], part.text),)
        events: list[bytes] = []
        for part in parts:
            match part:
                case CallStart():
                    events += self._open(Kind.CALL, part)
                case CallArguments(text=text) | Content(text) | Reasoning(text):
                    if type(part) is not self._growing:
                        events += self._open(Kind.TEXT if isinstance(part, Content) else Kind.THOUGHT)
                    self.blocks[-1].pieces.append(text)
                    events.append(self.grown(self.blocks[-1], text))
        if finish is not None:
            self.finish, self.stop_reason = finish, step.stop_reason
            events += self._close(cut_off=finish == "length" or self._parser.is_in_call(step.choice))
        return events

    def _open(self, kind: Kind, call: CallStart | None = None) -> list[bytes]:
        """Close the open block, if there is one, and open a new one. Return the events for the closed and for the new block."""
        events = self._close()
        self._growing = PARTS[kind]
        block = Block(len(self.blocks), kind, self.new_id(kind), call)
        self.blocks.append(block)
        return [*events, *self.opened(block)]

    def _close(self, *, cut_off: bool = False) -> Sequence[bytes]:
        """Close the open block, if there is one, and return its last events."""
        if self._growing is None:
            return ()
        self._growing = None
        block = self.blocks[-1]
        block.cut_off = cut_off
        return self.closed(block)

    def note_begun(self) -> None:
        """React to the first step of an answer that is sent as a whole. The default does nothing."""
        return

    def note_logprobs(self, step: Step) -> None:
        """Process the log-probabilities of a step, before the step's text is added. The default ignores the log-probabilities."""
        del step

    def failed(self, error: ApiError) -> Sequence[bytes]:
        """Return the events that end a stream after an error. The default raises `error`, which the stream (`sse.py`) then encodes."""
        raise error

    @abstractmethod
    def new_id(self, kind: Kind) -> str:
        """Return an id for a new block."""
        ...

    @abstractmethod
    def begin(self) -> Sequence[bytes]:
        """Return the events that begin a stream."""
        ...

    @abstractmethod
    def opened(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been opened."""
        ...

    @abstractmethod
    def grown(self, block: Block, text: str) -> bytes:
        """Return the event for a text that was just added to a block, or b"" to send none."""
        ...

    @abstractmethod
    def closed(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been closed."""
        ...

    @abstractmethod
    def end(self) -> Sequence[bytes]:
        """Return the events that end a stream."""
        ...

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """Return the whole answer in small pieces, because encoding it in one call would delay other requests."""


# type of the parts that extend a block, by the block's kind
PARTS: dict[Kind, type[Part]] = {Kind.TEXT: Content, Kind.THOUGHT: Reasoning, Kind.CALL: CallArguments}
