"""A vocabulary of bytes and a few markers, on which llguidance checks what a constraint allows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint, ConstraintKind
from server.text.dialects.calls.syntax import CallSyntax
from server.text.dialects.tool import ToolSchema

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


def behind_marker(calls: CallSyntax, tools: Sequence[ToolSchema], ids: Mapping[str, int] | None = None) -> Constraint:
    """Return the constraint on calls after their opening marker, in a vocabulary with the markers `ids`."""
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(["start: inside", *calls.inside(tools, ids or {}, several=True)]))


def accepts_marked(constraint: Constraint, text: str, ids: Mapping[str, int]) -> bool:
    """Return whether the constraint allows a text in which each of the markers `ids` is one token. Their ids begin at 256."""

    class Marked(ByteVocabulary):
        eos_token_id = 256 + len(ids)
        tokens = [bytes([i]) for i in range(256)] + [marker.encode() for marker in ids] + [b"<eos>"]
        special_token_ids = [*range(256, 257 + len(ids))]  # noqa: RUF012

    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if ids else [text]
    tokens = [token for piece in pieces for token in ([ids[piece]] if piece in ids else piece.encode())]
    return _accepts(LLTokenizer(TokenizerWrapper(Marked())), constraint, tokens)


def accepts(constraint: Constraint, *tokens: str | int) -> bool:
    return _accepts(vocabulary(), constraint, [i for token in tokens for i in ([token] if isinstance(token, int) else token.encode())])


def _accepts(vocabulary: LLTokenizer, constraint: Constraint, ids: list[int]) -> bool:
    matcher = LLMatcher(vocabulary, grammar_of(Source(constraint.kind, constraint.source, constraint.head)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
