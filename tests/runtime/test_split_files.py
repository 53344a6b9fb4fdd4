"""Names of files that are parts of one model."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from runtime.split_files import pattern_of


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("m.gguf", ["n.gguf", "m-00001-of-00002.gguf"]),
        ("m-00002-of-00003.gguf", ["m.gguf", "n-00002-of-00003.gguf"]),
        ("m[v2].gguf", ["mv.gguf"]),
        ("m*.gguf", ["m2.gguf"]),
        ("m?[a]-00001-of-00002.gguf", ["m2a-00001-of-00002.gguf"]),
    ],
)
def test_a_pattern_fits_the_parts_and_nothing_else(name: str, others: list[str]) -> None:
    assert fnmatchcase(name, pattern_of(name))
    assert not any(fnmatchcase(other, pattern_of(name)) for other in others)
