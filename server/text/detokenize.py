"""Turn the tokens of one choice into text, without partial characters, beginnings of stop strings, or text after a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MOST_PARTIAL = 3  # most bytes of an incomplete UTF-8 character


class TokenBytes(Protocol):
    """A tokenizer, as far as the Detokenizer needs it."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes that a token adds to a text."""
        ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """The strings that end the text. If several match, the first to be complete wins, as if each character were checked in turn."""

    strings: tuple[str, ...] = ()
    include: bool = False  # the match itself belongs to the text
    min_tokens: int = 0  # stop strings are searched only in the text from the token with this number on
    prefixes: frozenset[str] = field(init=False, repr=False)  # all beginnings of `strings`, without the whole strings
    max_prefix: int = field(init=False, repr=False)  # length of the longest of `prefixes`

    def __post_init__(self) -> None:
        prefixes = frozenset(stop[:length] for stop in self.strings for length in range(1, len(stop)))
        object.__setattr__(self, "prefixes", prefixes)
        object.__setattr__(self, "max_prefix", max(map(len, prefixes), default=0))


class Detokenizer:
    """Turns the tokens of one choice into text. `push` returns the text that is certain. `finish` returns the text that was held back only
    because it might have begun a stop string.

    An incomplete character at the end of the tokens is dropped: the model was cut off and did not write an invalid byte. `token_starts`
    gives the position of each token's text, in characters from the beginning of the answer.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_owes",
        "_shown",
        "_stops",
        "_tokenizer",
        "length",
        "num_tokens",
        "stopped_by",
        "token_starts",
    )

    def __init__(
        self, tokenizer: TokenBytes, stops: StopRules, shown: Mapping[int, bytes] | None = None, prompt_ids: Sequence[int] = ()
    ) -> None:
        """`shown`: the bytes of special tokens that appear as text, because a parser needs them. `prompt_ids`: the tokens before the
        answer. If these end within a character that the first tokens of the answer complete, the character belongs to the answer."""
        self._tokenizer = tokenizer
        self._stops = stops
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.num_tokens = 0
        self.length = 0  # characters returned so far
        self.stopped_by: str | None = None  # the stop string that has ended the text; None: none has
        self.token_starts: list[int] = []
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= MOST_PARTIAL or not (piece := tokenizer.token_bytes(token_id)):
                break
            tail = piece + tail
        self._decoder.decode(tail[-MOST_PARTIAL:])  # the decoder keeps the bytes of an incomplete character
        self._owes = bool(self._decoder.getstate()[0])  # the answer has no bytes yet, and the prompt ends within a character

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens. Return the text that is certain now. The tokens after the one that completes a stop string are ignored; the caller
        then pushes no more."""
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            self.token_starts.append(self.length + len(text) + len(self._held))
            data = self._tokenizer.token_bytes(token_id) or self._shown.get(token_id, b"")
            if self._owes and data:
                self._owes = False
                if not 0x80 <= data[0] < 0xC0:  # the answer does not continue the prompt's last character, so drop it
                    self._decoder.reset()
            piece = self._decoder.decode(data)
            if not piece:
                continue
            if not self._stops.strings or self.num_tokens < self._stops.min_tokens:
                text += piece
                continue
            text += self._settle(self._held + piece)
            if self.stopped_by is not None:
                break
        self.length += len(text)
        return text

    def finish(self) -> str:
        """Return the text that was held back. Called when no more tokens come."""
        text, self._held = self._held, ""
        self.length += len(text)
        return text

    def _settle(self, pending: str) -> str:
        """Return the part of `pending` that is certain, and keep the rest in `_held`. If there is a stop string, note it in `stopped_by`,
        and drop the text after it."""
        stops = self._stops
        matches = [(at + len(stop), at, stop) for stop in stops.strings if (at := pending.find(stop)) >= 0]
        if matches:
            end, start, self.stopped_by = min(matches)
            self._held = ""
            return pending[: end if stops.include else start]
        for length in range(min(stops.max_prefix, len(pending)), 0, -1):
            if pending[-length:] in stops.prefixes:
                self._held = pending[-length:]
                return pending[:-length]
        self._held = ""
        return pending


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
