"""Write texts that were read with their escapes. An escape may stand for half of a surrogate pair, which no answer can carry."""

from __future__ import annotations

import json


def whole_characters(text: str) -> str:
    """Return a text in which the two halves of a character are that character. A half alone is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_json(value: object) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))
