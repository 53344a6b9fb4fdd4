"""Words and their times from the attention of tokens to frames."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from server.speech.words import Word, _joined, _shortened, _warped, split, timed_words

TEXTS = {0: " The", 1: " sky", 2: "ward", 3: " path", 4: ".", 5: " (", 6: "now", 7: ")", 8: "今", 9: "天"}


def decode(token_ids: list[int]) -> str:
    return "".join(TEXTS[token] for token in token_ids)


def cheapest(costs: NDArray[np.float64]) -> float:
    """Return the least cost of all paths, by trying each."""
    rows, columns = costs.shape

    def below(i: int, j: int) -> float:
        rest = [below(a, b) for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)) if a < rows and b < columns]
        return float(costs[i, j]) + (min(rest) if rest else 0.0)

    return below(0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_path_is_the_cheapest(seed: int) -> None:
    costs = np.random.default_rng(seed).standard_normal((4, 6))
    firsts = _warped(costs)
    assert firsts[0] == 0 and (np.diff(firsts) >= 0).all()
    lasts = [*firsts[1:], 5]  # a row ends where the next one begins, or in the column before
    ends = [range(max(first, last - 1), last + 1) for first, last in zip(firsts[:-1], lasts, strict=False)]
    found = min(
        sum(float(costs[row, first : end + 1].sum()) for row, (first, end) in enumerate(zip(firsts, [*chosen, 5], strict=True)))
        for chosen in itertools.product(*ends)
    )
    assert found == pytest.approx(cheapest(costs))


def test_words_begin_where_their_tokens_attend() -> None:
    """There are four tokens: one before the text, two of the text, and the end. Each attends to one span of frames."""
    attention = np.full((4, 2, 40), 1e-4, np.float32)
    for token, (begin, end) in enumerate(((0, 10), (10, 25), (25, 40), (38, 40))):
        attention[token, :, begin:end] = 1
    timed = timed_words(attention, [0, 3], decode, "en")
    (first, second) = timed.words
    assert timed.typical_s == pytest.approx((first.duration_s + second.duration_s) / 2)
    assert (first.text, second.text) == (" The", " path")
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == pytest.approx((0.0, 0.2, 0.2, 0.5), abs=0.04)


def test_attention_without_differences_has_times() -> None:
    timed = timed_words(np.full((4, 3, 1), 0.5, np.float32), [0, 3], decode, "en")
    assert [word.text for word in timed.words] == [" The", " path"]
    assert all(word.start_s == word.end_s == 0 for word in timed.words) and timed.typical_s == 0


@pytest.mark.parametrize(
    ("token_ids", "language", "words"),
    [
        ([0, 1, 2, 3, 4], "en", [(" The", 1), (" skyward", 2), (" path", 1), (".", 1)]),
        ([5, 6, 7], "en", [(" (now", 2), (")", 1)]),
        ([8, 9], "zh", [("今", 1), ("天", 1)]),
        ([8, 9], "en", [("今天", 2)]),
        ([], "en", []),
    ],
)
def test_tokens_are_split_into_words(token_ids: list[int], language: str, words: list[tuple[str, int]]) -> None:
    assert split(token_ids, decode, language) == words


def test_tokens_that_are_parts_of_a_character_stay_together() -> None:
    data = "é!".encode()

    def decode(token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    assert split(list(data), decode, "fr") == [("é", 2), ("!", 1)]


def word(text: str, start_s: float, end_s: float) -> Word:
    return Word(text, 1, start_s, end_s)


def test_punctuation_joins_its_word() -> None:
    words = [word(" (", 0, 1), word("now", 1, 2), word(")", 2, 3), word(".", 3, 4), word(" Yes", 4, 5)]
    assert _joined(words) == [Word(" (now).", 4, 1, 2), Word(" Yes", 1, 4, 5)]


def test_pauses_at_ends_of_sentences_are_left_out() -> None:
    words = [word(" a", 0, 0.2), word(" b", 0.2, 0.4), word(".", 0.4, 3.0), word(" c", 3.0, 5.0), word(" d", 5.0, 5.2)]
    found = [(word.text, round(word.start_s, 6), round(word.end_s, 6)) for word in _shortened(words, 0.2)]
    assert found == [(" a", 0, 0.2), (" b", 0.2, 0.4), (".", 0.4, 0.8), (" c", 4.6, 5.0), (" d", 5.0, 5.2)]
