"""Texts into tokens, within bounds that are checked before the work they bound.

`tokenizers` works without Python's lock, but hands over and frees its results under it, 0.2 us a token. So short texts go together, and
of a long text only as much is encoded as shows that it is too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from server.interfaces import Tokenizer

PIECE_CHARS = 64 << 10  # encoded in one call
DENSE = 4  # characters a token; a text with more of them than that in its context is counted piece by piece first
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
    if keep is None:
        check_chars(len(text), tokenizer, param, context)
    limit = context if keep is None else keep
    if len(text) <= max(PIECE_CHARS, DENSE * limit):
        return text
    reach = _reach(text, tokenizer, limit, from_end=keep is not None and side != "right")
    if keep is not None:
        return text[:reach] if side == "right" else text[len(text) - reach :]
    if reach < len(text):
        raise too_long(context, f"{param} has more than {limit} tokens", param)
    return text


def _reach(text: str, tokenizer: Tokenizer, limit: int, *, from_end: bool) -> int:
    """How many characters, in whole pieces, certainly hold more than `limit` tokens; all of them if the text may have fewer."""
    num_tokens, at = 0, 0
    while at < len(text) and num_tokens <= limit:
        piece = text[max(0, len(text) - at - PIECE_CHARS) : len(text) - at] if from_end else text[at : at + PIECE_CHARS]
        # A cut can part a token into as many as it has characters, but into no more.
        num_tokens += tokenizer.count(piece) - tokenizer.max_token_chars
        at += len(piece)
    return at


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
