"""Encode log-probabilities in the JSON shapes of OpenAI's chat and completions, and prompt log-probabilities in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from server.api.answer.generate import TokenEntry
from server.api.answer.shapes import ChatLogprobs, ChatToken, CompletionLogprobs, PromptLogprobs, RankedChatToken, RankedToken
from server.interfaces import Tokenizer
from server.messages import TokenLogprob

LEAST = -9999.0  # replaces minus infinity, which JSON cannot express


PIECE = 256  # tokens whose log-probabilities are encoded in one call
encode = msgspec.json.encode


@dataclass(slots=True)
class Columns:
    """The log-probabilities of a completion. Each field is one array of the JSON answer, as a list of encoded pieces. Pieces are encoded
    when tokens arrive, because encoding a long answer at its end would hold up other streams."""

    tokens: list[bytes] = field(default_factory=list)
    token_logprobs: list[bytes] = field(default_factory=list)
    top_logprobs: list[bytes] = field(default_factory=list)
    text_offset: list[bytes] = field(default_factory=list)

    def add(self, shape: CompletionLogprobs) -> None:
        """Encode the log-probabilities of some tokens."""
        if shape["tokens"]:
            self.tokens.append(encode(shape["tokens"])[1:-1])
            self.token_logprobs.append(encode(shape["token_logprobs"])[1:-1])
            self.top_logprobs.append(encode(shape["top_logprobs"])[1:-1])
            self.text_offset.append(encode(shape["text_offset"])[1:-1])

    def behind(self, first: Columns) -> Columns:
        """Return the columns of `first`, continued by those of `self`."""
        return Columns(
            first.tokens + self.tokens,
            first.token_logprobs + self.token_logprobs,
            first.top_logprobs + self.top_logprobs,
            first.text_offset + self.text_offset,
        )

    def whole(self) -> CompletionLogprobs:
        """Return the arrays in the shape of an answer."""
        columns = ("tokens", self.tokens), ("token_logprobs", self.token_logprobs)
        further = ("top_logprobs", self.top_logprobs), ("text_offset", self.text_offset)
        written = {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in (*columns, *further)}
        return cast("CompletionLogprobs", written)


class LogprobWriter:
    """Writes log-probabilities with the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids  # write "token_id:17" instead of the text, because two tokens may have the same text

    def chat_entries(self, entries: Sequence[TokenEntry]) -> list[bytes]:
        """Encode entries in the shape of a chat answer. Callers do so when entries arrive, because encoding a long answer at its end would
        hold up other streams."""
        return [encode(self._chat_entry(entry.logprob)) for entry in entries]

    def chat(self, written: Sequence[bytes]) -> ChatLogprobs:
        """Return the `logprobs` object of a chat answer with these encoded entries."""
        return {"content": cast("Sequence[RankedChatToken]", msgspec.Raw(b"[" + b",".join(written) + b"]")), "refusal": None}

    def completion(self, entries: Sequence[TokenEntry], *, shift: int = 0) -> CompletionLogprobs:
        """Return log-probabilities in the shape of a completion. `shift` is the number of characters that precede the answer in the
        returned text: the length of an echoed prompt."""
        return {
            "tokens": [self._text(entry.logprob.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob.logprob) for entry in entries],
            "top_logprobs": [self._top(entry.logprob) for entry in entries],
            "text_offset": [shift + entry.start for entry in entries],
        }

    def echo(self, ids: Sequence[int], starts: Sequence[int], read: Sequence[TokenLogprob | None]) -> Columns:
        """Return the log-probabilities of an echoed prompt as columns of a completion. `starts`: index in the prompt's text at which each
        token begins. `read`: log-probability of each token; None for the first token, because nothing precedes it."""
        columns = Columns()
        for at in range(0, len(ids), PIECE):
            part = read[at : at + PIECE]
            columns.add(
                {
                    "tokens": [self._text(token_id) for token_id in ids[at : at + PIECE]],
                    "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in part],
                    "top_logprobs": [None if entry is None else self._top(entry) for entry in part],
                    "text_offset": list(starts[at : at + PIECE]),
                }
            )
        return columns

    def prompt(self, read: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        """Return the log-probabilities of a prompt in vLLM's shape."""
        parts = [
            encode([None if entry is None else self._ranked(entry) for entry in read[at : at + PIECE]])[1:-1]
            for at in range(0, len(read), PIECE)
        ]
        return cast("PromptLogprobs", msgspec.Raw(b"[" + b",".join(parts) + b"]"))

    def _chat_entry(self, entry: TokenLogprob) -> RankedChatToken:
        """Return a token with the most probable tokens at its position, in the shape of a chat answer."""
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> ChatToken:
        """Return a token with its log-probability, in the shape of a chat answer."""
        raw = self._bytes(token_id)
        return {"token": self._text(token_id, raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the most probable tokens and of the token itself, by their texts."""
        top = {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
        top.setdefault(self._text(entry.token_id), _finite(entry.logprob))
        return top

    def _ranked(self, entry: TokenLogprob) -> dict[str, RankedToken]:
        """Return the log-probabilities and ranks of the most probable tokens and of the token itself, by their ids."""
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a special token."""
        raw = self._tokenizer.token_bytes(token_id)
        return raw or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _text(self, token_id: int, raw: bytes | None = None) -> str:
        """Return the name of a token in an answer: its id if the request wants ids, otherwise its text, or its bytes if they are not valid
        UTF-8."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._bytes(token_id) if raw is None else raw
        try:
            return raw.decode()
        except UnicodeDecodeError:  # the token has only a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def count_logprobs(read: Sequence[TokenLogprob | None]) -> int:
    """Count the log-probabilities, including those of alternative tokens."""
    return sum(1 + len(entry.top) for entry in read if entry is not None)


def _finite(logprob: float) -> float:
    """Return a log-probability, but at least LEAST."""
    return max(logprob, LEAST)
