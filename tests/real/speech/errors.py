"""Count the words of a transcript that are not those of the speech."""

from __future__ import annotations

import re


def words_of(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", text.lower()).split()


def errors(found: str, said: str) -> int:
    """Return how many words are replaced, left out or inserted."""
    a, b = words_of(found), words_of(said)
    row = [*range(len(b) + 1)]
    for i, one in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (one != other))
    return row[-1]
