"""Remember the latest prompts of a model. For a new prompt, find the earlier prompt that shares the longest beginning with it, and the
place where the two differ."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

MOST_PROMPTS, MOST_CHARS = 32, 16 << 20  # largest number of remembered prompts, and of characters in all of them
STEP = 4096  # characters that are compared at once
TAIL = 64  # characters at the end of a prompt, which begin the answer; the next prompt of the conversation may differ there


@dataclass(slots=True, eq=False)
class LatestPrompts:
    """Remembers the latest prompts, one for each conversation: a prompt that continues an earlier prompt replaces it. A prompt continues an
    earlier one if it begins with all characters of the earlier one but the last TAIL."""

    _prompts: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict[tuple[str, str], None])
    _num_chars: int = 0
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def difference(self, salt: str, prompt: str) -> int | None:
        """Remember a prompt. Of the earlier prompts with the same salt, find the one that shares the longest beginning with this prompt,
        and return the length of that beginning. Return None if there is no earlier prompt, or if this one continues the prompt that was
        found."""
        with self._changing:
            earlier = [text for owner, text in self._prompts if owner == salt]
        shared = [(num_shared(text, prompt), text) for text in earlier]
        most, nearest = max(shared, key=lambda found: found[0], default=(0, ""))
        continues = most + TAIL >= len(nearest)
        with self._changing:
            if continues:
                self._forget((salt, nearest))
            self._remember((salt, prompt))
        return None if continues else most

    def _remember(self, entry: tuple[str, str]) -> None:
        """Add a prompt as the latest one, and forget the oldest ones while a limit is exceeded."""
        self._forget(entry)
        self._prompts[entry] = None
        self._num_chars += len(entry[1])
        while self._prompts and (len(self._prompts) > MOST_PROMPTS or self._num_chars > MOST_CHARS):
            self._forget(next(iter(self._prompts)))

    def _forget(self, entry: tuple[str, str]) -> None:
        """Remove a prompt, if it is remembered."""
        if entry in self._prompts:
            del self._prompts[entry]
            self._num_chars -= len(entry[1])


def num_shared(a: str, b: str) -> int:
    """Return the length of the common beginning of two texts."""
    at, most = 0, min(len(a), len(b))
    while at < most and a[at : at + STEP] == b[at : at + STEP] and at + STEP <= most:
        at += STEP
    low, high = at, min(at + STEP, most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
