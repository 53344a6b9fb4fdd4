"""Find the times of words from the attention of a transcript's tokens to the frames of its audio: dynamic time warping finds the path
through the frames on which the tokens attend most. The steps are those of Whisper's authors."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from server.speech.tokens import STAMP_S

MEDIAN = 7  # frames of the median filter
WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages that put no spaces between words
BEFORE_WORDS, AFTER_WORDS = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the next word, and to the word before
SENTENCE_ENDS = ".。!！?？"
MOST_TYPICAL_S = 0.7  # a longer median duration of words is not credible
MOST_WORDS = 2  # a word with a pause beside it lasts at most as long as this many typical words
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are only a part of a character

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Word:
    """A word, with its times in seconds."""

    text: str
    num_tokens: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TimedWords:
    """The words of a window, with times from its beginning."""

    words: Sequence[Word] = ()
    # the median of all durations above 0, before words are shortened and joined; at most MOST_TYPICAL_S
    typical_s: float = 0.0


def timed_words(attention: NDArray[np.float32], token_ids: Sequence[int], decode: Decode, language: str) -> TimedWords:
    """Return the words of the text tokens `token_ids`. `attention` has the shape [tokens, heads, frames]: the frames are those of the
    recording, and the last tokens are one token before the text, the text, and the token that ends the transcript."""
    starts = _starts(attention, len(token_ids) + 1) * STAMP_S
    words, at = list[Word](), 0
    for text, count in split(token_ids, decode, language):
        words.append(Word(text, count, float(starts[at]), float(starts[at + count])))
        at += count
    durations = [word.duration_s for word in words if word.duration_s > 0]
    typical_s = min(MOST_TYPICAL_S, float(np.median(durations))) if durations else 0.0
    return TimedWords(_joined(_shortened(words, typical_s)), typical_s)


def _starts(attention: NDArray[np.float32], num_rows: int) -> NDArray[np.int64]:
    """Return the first frame to which each of the `num_rows` tokens before the last one is aligned."""
    weights = attention.astype(np.float64)
    weights /= weights.sum(axis=2, keepdims=True)
    spread = weights.std(axis=0)
    weights = (weights - weights.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    rows = weights[-1 - num_rows : -1]
    edge = MEDIAN // 2
    if rows.shape[2] > edge:
        padded = np.pad(rows, ((0, 0), (0, 0), (edge, edge)), "reflect")
        rows = np.median(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN, axis=2), axis=3)
    return _warped(-rows.mean(axis=1))


def _warped(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the first column of each row on the cheapest path from the first to the last element. The path never goes back to an earlier
    row or column."""
    num_rows, num_columns = costs.shape
    totals = np.full((num_rows + 1, num_columns + 1), np.inf)
    moves = np.full((num_rows + 1, num_columns + 1), 2, np.int8)  # 0: row and column grow, 1: the row grows, 2: the column grows
    totals[0, 0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = totals[i - 1, j - 1], totals[i - 1, j], totals[i, j - 1]
        move = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        moves[i, j] = move
        totals[i, j] = costs[i - 1, j - 1] + np.choose(move, (both, row, column))
    found, i, j = np.zeros(num_rows, np.int64), num_rows, num_columns
    while i > 0:
        found[i - 1] = j - 1
        move = moves[i, j] if j > 1 else 1
        i, j = i - (move < 2), j - (move != 1)
    return found


def split(token_ids: Sequence[int], decode: Decode, language: str) -> list[tuple[str, int]]:
    """Divide the text of the tokens into words. Return each word with its number of tokens. A token that is only a punctuation mark is a
    word, too. In languages without spaces, each token is a word, or several tokens are one word if only together they have whole
    characters."""
    found: list[tuple[str, int]] = []
    held: list[int] = []
    for place, token_id in enumerate(token_ids):
        held.append(token_id)
        text = decode(held)
        if INCOMPLETE in text and place < len(token_ids) - 1:
            continue
        joins = bool(found) and language not in WITHOUT_SPACES and not text.startswith(" ") and not _is_mark(text)
        if joins:
            before, count = found.pop()
            found.append((before + text, count + len(held)))
        else:
            found.append((text, len(held)))
        held = []
    return found


def _is_mark(text: str) -> bool:
    """Return whether a text is one punctuation mark of ASCII, with or without white space around it."""
    return text.strip() in set(string.punctuation)


def _shortened(words: Sequence[Word], typical_s: float) -> list[Word]:
    """If a mark that ends a sentence, or the word after it, is much longer than a typical word, shorten it: it includes the pause."""
    most_s, found = MOST_WORDS * typical_s, list(words)
    for place in range(1, len(words)):
        word = words[place]
        if word.duration_s <= most_s:
            continue
        if word.text.strip() in SENTENCE_ENDS:
            found[place] = replace(word, end_s=word.start_s + most_s)
        elif words[place - 1].text.strip() in SENTENCE_ENDS:
            found[place] = replace(word, start_s=word.end_s - most_s)
    return found


def _joined(words: Sequence[Word]) -> list[Word]:
    """Join punctuation to the words to which it belongs. The times of these words stay the same."""
    found: list[Word] = []
    before, num_before = "", 0
    for place, word in enumerate(words):
        mark = word.text.strip()
        if found and not before and mark in set(AFTER_WORDS) and not word.text.startswith(" "):
            found[-1] = replace(found[-1], text=found[-1].text + word.text, num_tokens=found[-1].num_tokens + word.num_tokens)
        elif mark in set(BEFORE_WORDS) and word.text.startswith(" ") and place < len(words) - 1:
            before, num_before = before + word.text, num_before + word.num_tokens
        else:
            found.append(replace(word, text=before + word.text, num_tokens=num_before + word.num_tokens))
            before, num_before = "", 0
    return found
