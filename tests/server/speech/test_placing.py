"""The words of a window are given to its segments, and each takes bounds from the other."""

from __future__ import annotations

import pytest

from server.speech.placing import Part, end_of_speech, placed
from server.speech.words import TimedWords, Word

Times = list[tuple[float, float]]


def word(text: str, start_s: float, end_s: float, num_tokens: int = 1) -> Word:
    return Word(text, num_tokens, start_s, end_s)


def part(start_s: float, end_s: float, num_texts: int) -> Part:
    return Part(start_s, end_s, (), num_texts)


def times(found: Part) -> tuple[tuple[float, float], Times]:
    return (found.start_s, found.end_s), [(round(word.start_s, 6), round(word.end_s, 6)) for word in found.words]


def test_each_segment_takes_the_words_of_its_tokens() -> None:
    words = [word(" a", 0.0, 0.2), word(" b", 0.2, 0.4, 2), word(" c", 0.5, 0.7)]
    first, second, third = placed([part(10, 10.4, 3), part(10.4, 10.6, 0), part(10.6, 11, 1)], TimedWords(words, 0.2), 10.0, 10.0)
    assert times(first) == ((10.0, 10.4), [(10.0, 10.2), (10.2, 10.4)])
    assert times(second) == ((10.4, 10.6), [])
    assert times(third) == ((10.5, 10.7), [(10.5, 10.7)]), "the segment begins and ends with its words"
    assert end_of_speech([first, second, third]) == 10.7 and end_of_speech([first, second]) == 10.4
    assert end_of_speech([second]) == 10.6, "without words, the stamps tell"


@pytest.mark.parametrize(
    ("words", "bounds", "spoken_s", "expected"),
    [
        # a first word that begins long before its segment begins with it, but keeps a typical duration
        ([(0.0, 2.0), (2.0, 2.4)], (11.0, 12.4), 11.9, ((11.0, 12.4), [(11.0, 12.0), (12.0, 12.4)])),
        ([(0.0, 2.0), (2.0, 2.4)], (11.9, 12.4), 11.9, ((11.9, 12.4), [(11.7, 12.0), (12.0, 12.4)])),
        # a last word that ends long after its segment ends with it, but keeps a typical duration
        ([(0.0, 0.3), (0.3, 2.5)], (10.0, 11.5), 10.0, ((10.0, 11.5), [(10.0, 10.3), (10.3, 11.5)])),
        ([(0.0, 0.3), (0.3, 2.5)], (10.0, 10.4), 10.0, ((10.0, 10.4), [(10.0, 10.3), (10.3, 10.6)])),
        # a word that reaches only a little beyond moves the bound
        ([(0.0, 0.3), (0.3, 0.9)], (10.2, 10.6), 10.0, ((10.0, 10.9), [(10.0, 10.3), (10.3, 10.9)])),
        # a first word after a pause is at most two typical words long
        ([(0.0, 4.0), (4.0, 4.3)], (10.0, 14.3), 9.0, ((13.4, 14.3), [(13.4, 14.0), (14.0, 14.3)])),
        ([(0.0, 4.0)], (10.0, 14.0), 9.0, ((13.4, 14.0), [(13.4, 14.0)])),
        # so is the second one
        ([(0.0, 0.2), (0.2, 4.0)], (10.0, 14.0), 5.0, ((12.8, 14.0), [(12.8, 13.4), (13.4, 14.0)])),
        # without a pause before it, it is as long as it is
        ([(0.0, 1.0), (1.0, 1.3)], (10.0, 11.3), 10.0, ((10.0, 11.3), [(10.0, 11.0), (11.0, 11.3)])),
    ],
)
def test_long_words_are_cut(
    words: Times, bounds: tuple[float, float], spoken_s: float, expected: tuple[tuple[float, float], Times]
) -> None:
    timed = TimedWords([word(" a", *one) for one in words], 0.3)
    (found,) = placed([part(*bounds, len(words))], timed, 10.0, spoken_s)
    assert times(found) == expected


def test_a_segment_is_the_speech_before_the_next_one() -> None:
    """The first word of the second segment follows no pause, so it stays as long as it is."""
    words = [word(" a", 0.0, 0.3), word(" b", 0.4, 1.4)]
    alone = placed([part(10.4, 11.4, 1)], TimedWords(words[1:], 0.3), 10.0, 8.0)
    _, second = placed([part(10.0, 10.3, 1), part(10.4, 11.4, 1)], TimedWords(words, 0.3), 10.0, 8.0)
    assert times(alone[0]) == ((10.8, 11.4), [(10.8, 11.4)])
    assert times(second) == ((10.4, 11.4), [(10.4, 11.4)])
