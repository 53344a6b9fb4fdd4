"""Log-probabilities in the two shapes of the API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.answers import ChatLogprobs, ChatToken, CompletionLogprobs, PromptLogprobs, RankedChatToken, RankedToken
from server.api.generate import TokenEntry
from server.handle import Tokenizer
from server.messages import TokenLogprob

LEAST = -9999.0  # JSON has no minus infinity


class LogprobWriter:
    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids  # "token_id:17" instead of the text, which two tokens may share

    def chat(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        return {"content": [self._chat_entry(entry.logprob) for entry in entries], "refusal": None}

    def completion(self, entries: Sequence[TokenEntry], *, shift: int = 0) -> CompletionLogprobs:
        """`shift`: where the answer begins in the text that the client gets."""
        return {
            "tokens": [self._text(entry.logprob.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob.logprob) for entry in entries],
            "top_logprobs": [self._top(entry.logprob) for entry in entries],
            "text_offset": [shift + entry.start for entry in entries],
        }

    def echo(self, ids: Sequence[int], starts: Sequence[int], read: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """A prompt in the shape of `completion`; the first token follows nothing, so it has no probability."""
        return {
            "tokens": [self._text(token_id) for token_id in ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in read],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in read],
            "text_offset": list(starts),
        }

    def prompt(self, read: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        return [None if entry is None else self._ranked(entry) for entry in read]

    def _chat_entry(self, entry: TokenLogprob) -> RankedChatToken:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> ChatToken:
        raw = self._bytes(token_id)
        return {"token": self._text(token_id, raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top = {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
        top.setdefault(self._text(entry.token_id), _finite(entry.logprob))
        return top

    def _ranked(self, entry: TokenLogprob) -> dict[str, RankedToken]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }

    def _bytes(self, token_id: int) -> bytes:
        raw = self._tokenizer.token_bytes(token_id)
        return raw or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _text(self, token_id: int, raw: bytes | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._bytes(token_id) if raw is None else raw
        try:
            return raw.decode()
        except UnicodeDecodeError:  # part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": [*first["tokens"], *then["tokens"]],
        "token_logprobs": [*first["token_logprobs"], *then["token_logprobs"]],
        "top_logprobs": [*first["top_logprobs"], *then["top_logprobs"]],
        "text_offset": [*first["text_offset"], *then["text_offset"]],
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
