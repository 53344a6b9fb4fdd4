"""A vocabulary of bytes and a few markers, on which llguidance checks what a constraint allows."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint

THINK, UNTHINK, CALLS, EOS = 256, 257, 258, 259


class ByteVocabulary:
    eos_token_id = EOS
    bos_token_id = None
    # llguidance reads this attribute and `special_token_ids`
    tokens = [bytes([i]) for i in range(256)] + [b"<think>", b"</think>", b"[TOOL_CALLS]", b"<eos>"]
    special_token_ids = [THINK, UNTHINK, CALLS, EOS]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()))


def accepts(constraint: Constraint, *tokens: str | int) -> bool:
    ids = [i for token in tokens for i in ([token] if isinstance(token, int) else token.encode())]
    matcher = LLMatcher(vocabulary(), grammar_of(Source(constraint.kind, constraint.source, constraint.head)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
