"""The parser of calls between markers. A subclass reads one call; this class reads the text around calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from server.text.detokenize import overlap
from server.text.dialects.calls.stream import Steps, Stream
from server.text.dialects.calls.syntax import CallSyntax, own_id
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart, Content, Part

MAX_BEGINNING = 256  # characters; a longer text after a marker is not taken for the beginning of a call that was cut off


class MarkedCallParser(ABC):
    """Finds calls between the markers of a syntax. All other text is content."""

    separators = " \t\r\n,;"  # characters between calls
    unmarked = ""  # text that begins a call without the opening marker, if this text begins a line; empty: there is no such call

    def __init__(self, syntax: CallSyntax, tools: Sequence[ToolSchema], max_calls: int | None) -> None:
        self.num_calls = 0
        self.done = False  # the allowed number of calls was read
        self.stream = Stream()
        self.tools = {tool.name: tool for tool in tools}
        self._syntax = syntax
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self.is_marked = False  # an opening marker that only calls have was read before the present calls
        self._is_in_line = False  # the content since the last call ends within a line
        self.ids: set[str] = set()  # ids of all calls
        self._steps: Iterator[None] = self._read()

    def push(self, text: str) -> list[Part]:
        self.stream.held += text
        return self._advanced()

    def finish(self) -> list[Part]:
        self.stream.ended = True
        return self._advanced()

    @abstractmethod
    def read_call(self) -> Steps[bool]:
        """Read one call, and report it by `start` and `argue`. The markers and separators before it have been read. Return False if no call
        comes next."""
        ...

    def start(self, name: str, call_id: str = "") -> None:
        """Report that a call begins: its tool, and the id that the model wrote for it. If the id is empty or that of an earlier call, a new
        one takes its place. The text read so far can no longer become content."""
        self._parts.append(CallStart(self.num_calls, own_id(call_id, self.ids, self._syntax.id_length), name))
        self.stream.forget()

    def argue(self, text: str) -> None:
        """Add text to the arguments of the call."""
        if text:
            self._parts.append(CallArguments(self.num_calls, text))

    def _advanced(self) -> list[Part]:
        """Read the text that has arrived. Return the parts that were found."""
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Iterator[None]:
        """Read the whole answer. Text after the last allowed call is dropped."""
        if self._syntax.bare:
            while not (self.stream.held.strip() or self.stream.ended):
                yield
            if self.stream.held.lstrip()[:1] == "[":
                yield from self._read_calls()
        while not self.done and (yield from self._read_text()):
            yield from self._read_calls()
        while not self.stream.ended:
            self.stream.held = ""
            yield

    def _read_text(self) -> Steps[bool]:
        """Read content up to the opening marker, or up to a call without it, and return True. White space before the marker or the call is
        no content. Return False at the end of the answer."""
        stream, opening = self.stream, self._syntax.opening
        while True:
            text, found, _ = stream.held.partition(opening) if opening else (stream.held, "", "")
            if not found and not stream.ended:
                text = text[: len(text) - max(overlap(text, opening), overlap(text, self.unmarked))]
            if (at := self._unmarked_in(text)) >= 0:
                text, found = text[:at], self.unmarked
            if found or not stream.ended:
                text = text.rstrip()
            is_rest = stream.ended and not found and self.num_calls and opening.startswith(text.strip())
            if text and not is_rest:  # `is_rest`: white space after the last call, or the beginning of a marker that was cut off
                self._parts.append(Content(text))
                self._is_in_line = True
            stream.take(len(text))
            stream.forget()
            if at >= 0:
                self.is_marked = False
                return True
            if found:
                yield from stream.up_to(opening)
                self.is_marked = self._syntax.announces
                return True
            if stream.ended:
                stream.held = ""
                return False
            yield

    def _unmarked_in(self, text: str) -> int:
        """Return the index of the first call that begins a line without the opening marker, or -1 if none does."""
        at = text.find(self.unmarked) if self.unmarked else -1
        while at >= 0:
            before = text[:at].rstrip(" \t")
            if before.endswith("\n") or not (before or self._is_in_line):
                break
            at = text.find(self.unmarked, at + 1)
        return at

    def _read_calls(self) -> Steps[None]:
        """Read calls up to the closing marker, up to the last allowed call, or up to text that is no call. Such text becomes content,
        unless it may be the beginning of a call that was cut off. If the syntax has no closing marker and is not `bare`, read only one
        call."""
        stream, syntax = self.stream, self._syntax
        while not self.done:
            yield from stream.skip(self.separators)
            if (yield from stream.find(syntax.closing)):
                break
            if not (yield from self.read_call()):
                if stream.ended and self.is_marked and len(stream.taken) + len(stream.held) <= MAX_BEGINNING:
                    stream.held = ""
                elif text := stream.taken.lstrip(self.separators) if self.num_calls else stream.taken:
                    self._parts.append(Content(text))
                    self._is_in_line = not text.endswith("\n")
                break
            self.num_calls += 1
            self._is_in_line = False
            stream.forget()
            self.done = self.num_calls == self._max_calls
            if not (syntax.closing or syntax.bare):
                break  # the call has ended with its own marker
        stream.forget()
