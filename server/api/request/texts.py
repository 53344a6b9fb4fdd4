"""Texts into tokens, within bounds that are checked before the work they bound.

`tokenizers` works without Python's lock, but hands over and frees its results under it, 0.2 us a token. So short texts go together, and
of a long text only as much is encoded as shows that it is too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from server.interfaces import Tokenizer

PIECE_CHARS = 64 << 10  # encoded in one call
DENSE = 4  # characters a token; a text with more of them than that in its context is counted piece by piece first
SPARSE = 6  # characters a token; most texts have fewer, so that one piece holds as many tokens as are kept
WORD_END = re.compile(r"\S(?=\s)")
LAST_WORD_END = re.compile(r".*\S(?=\s)", re.DOTALL)
LEAST_TOKEN_CHARS = 128  # a normaliser may drop white space, and WordPiece makes one token of a word that it does not know


def encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, *, special: bool, keep: int | None = None, side: str | None = None
) -> list[list[int]]:
    """Texts that are known to fit, or of which `keep` tokens are left. Each group is cut before the next is encoded: to free millions of
    tokens at once takes 0.1 s."""
    return [truncate(ids, keep, side) for group in _grouped(texts) for ids in tokenizer.encode_all(group, special)]


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, param: str, *, special: bool, context: int, keep: int | None = None, side: str | None = None
) -> list[list[int]]:
    """Each text's tokens, of which there may be as many as the context holds. With `keep`, a text may be longer, and so many of its tokens
    are left, on that side."""
    needed = [_needed(text, tokenizer, param, context, keep, side) for text in texts]
    return encode_texts(needed, tokenizer, special=special, keep=keep, side=side)


def kept_of(asked: int | None, context: int, max_tokens: int | None) -> int | None:
    """How many tokens of a prompt are kept; -1 asks for as many as leave room for the answer."""
    return max(1, context - max(1, max_tokens or 1)) if asked == -1 else asked


def truncate(ids: list[int], keep: int | None, side: str | None) -> list[int]:
    """Only where the request asks for it."""
    if keep is None or len(ids) <= keep:
        return ids
    return ids[:keep] if side == "right" else ids[-keep:]


def too_long(context: int, found: str, param: str) -> ApiError:
    """Clients tell this error from others by its words: most by OpenAI's, with which it begins, LangChain by its code."""
    remedy = "shorten the prompt, lower max_tokens, or set truncate_prompt_tokens"
    message = f"This model's maximum context length is {context} tokens. However, {found} ({CONTEXT_LENGTH_EXCEEDED.code}); {remedy}."
    return ApiError(CONTEXT_LENGTH_EXCEEDED, message, param=param)


def most_chars(tokenizer: Tokenizer, context: int) -> int:
    """A longer text does not fit, whatever is in it."""
    return context * max(tokenizer.max_token_chars, LEAST_TOKEN_CHARS)


def check_chars(num_chars: int, tokenizer: Tokenizer, param: str, context: int) -> None:
    most = most_chars(tokenizer, context)
    if num_chars > most:
        raise too_long(context, f"{param} has {num_chars} characters or more, and so many tokens have {most} characters at most", param)


def _needed(text: str, tokenizer: Tokenizer, param: str, context: int, keep: int | None, side: str | None) -> str:
    if keep is not None:
        piece_chars = min(PIECE_CHARS, SPARSE * (keep + tokenizer.max_token_chars))
        if len(text) <= 2 * piece_chars:  # counting a piece and encoding it again would take as long
            return text
        if side == "right":
            return text[: _reach(text, tokenizer, keep, piece_chars)]
        return text[_reach_from_end(text, tokenizer, keep, piece_chars) :]
    check_chars(len(text), tokenizer, param, context)
    if len(text) > max(PIECE_CHARS, DENSE * context) and _reach(text, tokenizer, context, PIECE_CHARS) < len(text):
        raise too_long(context, f"{param} has more than {context} tokens", param)
    return text


def _reach(text: str, tokenizer: Tokenizer, limit: int, piece_chars: int) -> int:
    """Where the first pieces end that certainly hold more than `limit` tokens; the end of the text if it may have fewer."""
    num_tokens, end = 0, 0
    while end < len(text) and num_tokens <= limit:
        begin, end = end, _next_cut(text, end, piece_chars)
        num_tokens += _least_tokens(text[begin:end], tokenizer)
    return end


def _reach_from_end(text: str, tokenizer: Tokenizer, limit: int, piece_chars: int) -> int:
    """Where the last pieces begin that certainly hold more than `limit` tokens; 0 if the text may have fewer."""
    num_tokens, begin = 0, len(text)
    while begin > 0 and num_tokens <= limit:
        begin, end = _last_cut(text, begin, piece_chars), begin
        num_tokens += _least_tokens(text[begin:end], tokenizer)
    return begin


def _least_tokens(piece: str, tokenizer: Tokenizer) -> int:
    """A cut can part a token into as many as it has characters, but into no more."""
    return tokenizer.count(piece) - tokenizer.max_token_chars


def _next_cut(text: str, begin: int, piece_chars: int) -> int:
    """The end of a piece: of a word, as words are encoded apart, or of as many characters as are encoded in one call."""
    found = WORD_END.search(text, begin + piece_chars - 1, begin + PIECE_CHARS)
    return found.end() if found else min(begin + PIECE_CHARS, len(text))


def _last_cut(text: str, end: int, piece_chars: int) -> int:
    """Where a piece begins, by the same rule."""
    first = max(end - PIECE_CHARS, 0)
    found = LAST_WORD_END.match(text, first, max(end - piece_chars + 1, 0))
    return found.end() if found else first


def _grouped(texts: Sequence[str]) -> Iterable[list[str]]:
    group: list[str] = []
    num_chars = 0
    for text in texts:
        if group and num_chars + len(text) > PIECE_CHARS:
            yield group
            group, num_chars = [], 0
        group.append(text)
        num_chars += len(text) + 1
    if group:
        yield group
