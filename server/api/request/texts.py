"""Encode texts into tokens, within limits that are checked before the work that they bound.

`tokenizers` releases the GIL while it encodes, but holds the GIL while it returns and frees its results, for 0.2 us per token. So short
texts are encoded in small groups, and a long text is encoded only as far as needed to show that it is too long.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import cast

from server.api.request.schema import Prompts
from server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from server.interfaces import Tokenizer
from server.text.pairs import TextTemplate

PIECE_CHARS = 64 << 10  # characters encoded in one call
DENSE = 4  # characters per token; the tokens of a text with more than DENSE * context characters are first counted piece by piece
SPARSE = 6  # characters per token; most texts have fewer, so that one piece usually holds all tokens to keep
WORD_END = re.compile(r"\S(?=\s)")
LAST_WORD_END = re.compile(r".*\S(?=\s)", re.DOTALL)
NOTHING_AROUND = TextTemplate()
TOO_LONG_REMEDY = "; shorten the prompt, lower max_tokens, or set truncate_prompt_tokens."
MOST_ROOM = 2048  # most tokens that are left for an answer without a limit, so that prompts which fit are rarely truncated
LEAST_TOKEN_CHARS = 128  # any token may stand for this many characters: normalisers drop spaces, and an unknown word may be one token


def one_by_one(prompt: Prompts) -> Sequence[str | list[int]]:
    """Return the prompts of a request as a list. `prompt` may be a single prompt."""
    if isinstance(prompt, str):
        return [prompt]
    is_one = bool(prompt) and isinstance(prompt[0], int)
    return cast("Sequence[str | list[int]]", [prompt] if is_one else prompt)


def encode_texts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    special: bool,
    keep: int | None = None,
    side: str | None = None,
    around: TextTemplate = NOTHING_AROUND,
) -> list[list[int]]:
    """Encode texts that are known to be short enough, or truncate each to `keep` tokens: see `truncate`. `special`: put the tokenizer's
    special tokens around each text. Each group of texts is truncated before the next group is encoded, because freeing millions of tokens
    at once takes 0.1 s."""
    return [truncate(ids, keep, side, around) for group in _grouped(texts) for ids in tokenizer.encode_all(group, special)]


def encode_prompts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    param: str,
    *,
    special: bool,
    context: int,
    keep: int | None = None,
    side: str | None = None,
    around: TextTemplate = NOTHING_AROUND,
) -> list[list[int]]:
    """Encode texts. Without `keep`, raise ApiError for a long text that certainly has more tokens than the context. If the caller limits
    the number of tokens, it checks this number for other texts. With `keep`, longer texts are truncated to `keep` tokens instead, by
    removing tokens at `side`. Truncation keeps the special tokens `around` a text. `param`: the field that an error names."""
    needed = [_needed(text, tokenizer, param, context, keep, side) for text in texts]
    return encode_texts(needed, tokenizer, special=special, keep=keep, side=side, around=around)


def kept_of(asked: int | None, context: int, max_tokens: int | None) -> int | None:
    """Return how many tokens of a prompt to keep; None: all. If `asked` is -1, keep the largest number that leaves room in the context for
    an answer of `max_tokens`, but at least half of the context, because agents ask for longer answers than the context has room for. If
    `max_tokens` is None or -1, leave an eighth of the context for the answer, at most MOST_ROOM tokens."""
    if asked != -1:
        return asked
    room = min(context // 8, MOST_ROOM) if max_tokens is None or max_tokens < 0 else max_tokens
    return max(1, context - max(1, min(room, context // 2)))


def kept_alone(asked: int | None, context: int) -> int | None:
    """Return how many tokens of a text that gets no answer to keep; None: all. If `asked` is -1, keep as many as the context holds."""
    return context if asked == -1 else asked


@contextmanager
def without_answer() -> Generator[None]:
    """For requests without a generated answer: let the error about a long text suggest only fields that these requests have."""
    try:
        yield
    except ApiError as error:
        error.message = error.message.replace(TOO_LONG_REMEDY, "; shorten the text, or set truncate_prompt_tokens.")
        raise


def truncate(ids: list[int], keep: int | None, side: str | None, around: TextTemplate = NOTHING_AROUND) -> list[int]:
    """Return `ids` truncated to `keep` tokens by removing tokens at `side`, but not the special tokens `around` the text. Without `side`,
    remove tokens on the left. If there are more special tokens than `keep`, return the last `keep` tokens. Without `keep`, return all."""
    if keep is None or len(ids) <= keep:
        return ids
    begin, end = around.text_in(ids)
    room = keep - begin - (len(ids) - end)
    if room < 0:
        return ids[-keep:]
    kept = ids[begin : begin + room] if side == "right" else ids[end - room : end]
    return ids[:begin] + kept + ids[end:]


def too_long(context: int, found: str, param: str) -> ApiError:
    """Return the error for a prompt that does not fit. Its message begins with OpenAI's words, by which most clients recognise the error.
    LangChain recognises the error's code in the message."""
    message = f"This model's maximum context length is {context} tokens. However, {found} ({CONTEXT_LENGTH_EXCEEDED.code})"
    return ApiError(CONTEXT_LENGTH_EXCEEDED, message + TOO_LONG_REMEDY, param=param)


def most_chars(tokenizer: Tokenizer, context: int) -> int:
    """Return the largest number of characters that a text of `context` tokens can have."""
    return context * max(tokenizer.max_token_chars, LEAST_TOKEN_CHARS)


def check_chars(num_chars: int, tokenizer: Tokenizer, param: str, context: int) -> None:
    """Raise ApiError if a prompt has more characters than `context` tokens can have."""
    most = most_chars(tokenizer, context)
    if num_chars > most:
        raise too_long(context, f"{param} has at least {num_chars} characters; {context} tokens have at most {most}", param)


def _needed(text: str, tokenizer: Tokenizer, param: str, context: int, keep: int | None, side: str | None) -> str:
    """Return the part of a text that must be encoded: all of it, or if it is to be truncated, enough for `keep` tokens. Raise ApiError if a
    text that is not to be truncated is certainly too long; tokens are counted only for a text that is long enough to make counting
    worthwhile."""
    if keep is not None:
        piece_chars = min(PIECE_CHARS, SPARSE * (keep + tokenizer.max_token_chars))
        if len(text) <= 2 * piece_chars:  # counting tokens piece by piece first would save no time
            return text
        if side == "right":
            return text[: _reach(text, tokenizer, keep, piece_chars)]
        return text[_reach_from_end(text, tokenizer, keep, piece_chars) :]
    check_chars(len(text), tokenizer, param, context)
    if len(text) > max(PIECE_CHARS, DENSE * context) and _reach(text, tokenizer, context, PIECE_CHARS) < len(text):
        raise too_long(context, f"{param} has more than {context} tokens", param)
    return text


def _reach(text: str, tokenizer: Tokenizer, limit: int, piece_chars: int) -> int:
    """Return the end of the shortest prefix, in whole pieces, that certainly has more than `limit` tokens. If no shorter prefix certainly
    has so many tokens, return the text's end."""
    num_tokens, end = 0, 0
    while end < len(text) and num_tokens <= limit:
        begin, end = end, _next_cut(text, end, piece_chars)
        num_tokens += _least_tokens(text[begin:end], tokenizer)
    return end


def _reach_from_end(text: str, tokenizer: Tokenizer, limit: int, piece_chars: int) -> int:
    """Return the start of the shortest suffix, in whole pieces, that certainly has more than `limit` tokens, or 0 if there is none."""
    num_tokens, begin = 0, len(text)
    while begin > 0 and num_tokens <= limit:
        begin, end = _last_cut(text, begin, piece_chars), begin
        num_tokens += _least_tokens(text[begin:end], tokenizer)
    return begin


def _least_tokens(piece: str, tokenizer: Tokenizer) -> int:
    """Return a lower bound for the number of tokens that a piece contributes to its text. A cut inside a token splits it into at most as
    many tokens as it has characters, so subtract the largest number of characters of a token."""
    return tokenizer.count(piece) - tokenizer.max_token_chars


def _next_cut(text: str, begin: int, piece_chars: int) -> int:
    """Return the end of the next piece: the first end of a word after `piece_chars` characters, since words are encoded independently, or
    `begin` + PIECE_CHARS if no word ends before that."""
    found = WORD_END.search(text, begin + piece_chars - 1, begin + PIECE_CHARS)
    return found.end() if found else min(begin + PIECE_CHARS, len(text))


def _last_cut(text: str, end: int, piece_chars: int) -> int:
    """Return the beginning of the last piece before `end`, by the rule of `_next_cut`."""
    first = max(end - PIECE_CHARS, 0)
    found = LAST_WORD_END.match(text, first, max(end - piece_chars + 1, 0))
    return found.end() if found else first


def _grouped(texts: Sequence[str]) -> Iterable[list[str]]:
    """Yield the texts in groups of at most PIECE_CHARS characters. A longer text is a group of its own."""
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
