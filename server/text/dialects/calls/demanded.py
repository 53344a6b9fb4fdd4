"""The parser of answers that must be calls (`tool_choice: required`). After the first call, it ends the answer once the model writes text,
or repeats an earlier call. It drops all text outside calls and thoughts, such as the beginning of a call that `max_tokens` cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.text.parts import CallArguments, CallStart, Content, Part

if TYPE_CHECKING:
    from server.text.dialects.format import AnswerParser

Call = tuple[str, str]  # name, arguments as they were written


class DemandedCallParser:
    """Passes on the calls and thoughts that `inner` finds in an answer, but no content."""

    def __init__(self, inner: AnswerParser) -> None:
        self.num_calls = 0
        self._inner = inner
        self._ended = False  # the model has written text after a call, or has repeated a call
        self._earlier: list[Call] = []  # complete calls
        self._call: Call | None = None  # the call that is being read
        self._held: list[Part] = []  # parts of `_call`, while an earlier call begins with the same text: models may repeat a call for ever

    @property
    def reasons(self) -> bool:
        return self._inner.reasons

    @property
    def done(self) -> bool:
        return self._ended or self._inner.done

    def push(self, text: str) -> list[Part]:
        return self._kept(self._inner.push(text))

    def finish(self) -> list[Part]:
        return self._kept(self._inner.finish())

    def _kept(self, parts: list[Part]) -> list[Part]:
        """Return the calls and thoughts among `parts`. Note whether the answer has ended."""
        found: list[Part] = []
        for part in parts:
            if self._ended:
                break
            match part:
                case CallStart():
                    self._complete(found)
                    self._call = (part.name, "")
                    self._add(part, found)
                case CallArguments():
                    name, written = self._call or ("", "")
                    self._call = (name, written + part.text)
                    self._add(part, found)
                case Content(text):
                    self._complete(found)  # content comes only between calls
                    self._ended |= bool(self.num_calls and text.strip())
                case _:
                    found.append(part)
        if self._inner.num_calls > len(self._earlier):
            self._complete(found)
        return found

    def _add(self, part: Part, found: list[Part]) -> None:
        """Hold a part of the present call back, or add it to `found` if no earlier call begins with the same text."""
        self._held.append(part)
        if not any(self._is_begun_like(earlier) for earlier in self._earlier):
            self._release(found)

    def _is_begun_like(self, earlier: Call) -> bool:
        """Return whether an earlier call begins with what was read of the present one."""
        return self._call is not None and earlier[0] == self._call[0] and earlier[1].startswith(self._call[1])

    def _complete(self, found: list[Part]) -> None:
        """Add the call that is complete now to `found`, or end the answer if this call repeats an earlier one. Do nothing if no call has
        begun, or if the answer has ended."""
        if self._call is None or self._ended:
            return
        if self._call in self._earlier:
            self._ended = True
            self._held.clear()
            return
        self._release(found)
        self._earlier.append(self._call)
        self._call = None
        self.num_calls += 1

    def _release(self, found: list[Part]) -> None:
        """Move the parts that were held back to `found`."""
        found += self._held
        self._held.clear()
