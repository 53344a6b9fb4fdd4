"""Assign the words of a window to its segments, and adjust the times of words and segments so that they agree, as Whisper's authors do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.speech.words import MOST_WORDS, TimedWords, Word

BEYOND_S = 0.5  # a first or last word that reaches more than this beyond its segment is cut off at the segment's bound
PAUSE_WORDS = 4  # a pause lasts longer than this many typical words


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of a window, with times counted from the beginning of the recording."""

    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    num_texts: int  # number of tokens in `token_ids` that are text
    words: tuple[Word, ...] = ()


def placed(parts: Sequence[Part], timed: TimedWords, offset_s: float, spoken_s: float) -> list[Part]:
    """Return the parts with their words, and with start and end times adjusted to these words. The window begins at `offset_s`; the speech
    before the window ended at `spoken_s`."""
    found: list[Part] = []
    waiting = deque(timed.words)
    for part in parts:
        words = [_moved(word, offset_s) for word in _taken(waiting, part.num_texts)]
        if words:
            _shorten_after_pause(words, timed.typical_s, spoken_s)
            part = _bounded(part, words, timed.typical_s)
            spoken_s = part.end_s
        found.append(part)
    return found


def end_of_speech(parts: Sequence[Part]) -> float:
    """Return when the last word ends, or when the last part ends if no part has words. There is at least one part."""
    return next((part.words[-1].end_s for part in reversed(parts) if part.words), parts[-1].end_s)


def _taken(words: deque[Word], num_tokens: int) -> list[Word]:
    """Remove and return the words of the next `num_tokens` tokens of text."""
    found: list[Word] = []
    while words and num_tokens > 0:
        found.append(words.popleft())
        num_tokens -= found[-1].num_tokens
    return found


def _moved(word: Word, offset_s: float) -> Word:
    """Return the word with times counted from the beginning of the recording, rounded to hundredths of a second for the comparisons
    below."""
    return replace(word, start_s=round(word.start_s + offset_s, 2), end_s=round(word.end_s + offset_s, 2))


def _shorten_after_pause(words: list[Word], typical_s: float, spoken_s: float) -> None:
    """If there is a pause before `words`, and the first word or the first two are so long that they include the pause, shorten these words
    in the list. The earlier speech ended at `spoken_s`."""
    most_s = MOST_WORDS * typical_s
    first, second = words[0], words[1] if len(words) > 1 else None
    is_long = first.duration_s > most_s or (second is not None and second.end_s - first.start_s > 2 * most_s)
    if first.end_s - spoken_s <= PAUSE_WORDS * typical_s or not is_long:
        return
    if second is not None and second.duration_s > most_s:
        between_s = max(second.end_s / 2, second.end_s - most_s)
        first, words[1] = replace(first, end_s=between_s), replace(second, start_s=between_s)
    words[0] = replace(first, start_s=max(0.0, first.end_s - most_s))


def _bounded(part: Part, words: list[Word], typical_s: float) -> Part:
    """Return the part with `words`, and with the bounds of these words. If the first or last word reaches far beyond the part, the part
    keeps its own bound there, and the word is shortened, also in the list."""
    start_s, end_s, first = part.start_s, part.end_s, words[0]
    if first.start_s + BEYOND_S < start_s < first.end_s:
        words[0] = replace(first, start_s=max(0.0, min(first.end_s - typical_s, start_s)))
    else:
        start_s = first.start_s
    last = words[-1]
    if last.start_s < end_s < last.end_s - BEYOND_S:
        words[-1] = replace(last, end_s=max(last.start_s + typical_s, end_s))
    else:
        end_s = last.end_s
    return replace(part, start_s=start_s, end_s=end_s, words=tuple(words))
