"""The names of the files into which a large model is split: NAME-00001-of-00003.gguf and so on, also with the suffix .safetensors."""

from __future__ import annotations

import re
from glob import escape

MOST_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(gguf|safetensors)", re.ASCII | re.DOTALL)


def parts_of(name: str) -> list[str]:
    """Return the names of all parts, in order, given the name of one part. For any other name, return only this name."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= (count := int(match[3])) <= MOST_PARTS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.{match[4]}" for number in range(1, count + 1)]


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without its suffix, and without the part number of a file with several parts."""
    first, *others = parts_of(name)
    return first.removesuffix(".gguf").rpartition("-00001-of-")[0] if others else name.removesuffix(".gguf")


def pattern_of(name: str) -> str:
    """Return a shell pattern of the names of all parts, given the name of one part. For any other name, return a pattern
    that only this name matches."""
    first, *others = parts_of(name)
    return escape(first).replace("-00001-of-", "-?????-of-") if others else escape(name)
