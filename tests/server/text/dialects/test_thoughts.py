from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.dialects.thoughts import THINK, ThoughtSplitter
from server.text.parts import Content, Reasoning


def split(text: str, cuts: list[int], *, inside: bool) -> tuple[str, str]:
    splitter, parts, at = ThoughtSplitter(THINK, inside=inside), [], 0
    sizes = iter(cuts)
    while at < len(text):
        size = next(sizes, 1)
        parts += splitter.push(text[at : at + size])
        at += size
    parts += splitter.finish()
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return thought, "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize(
    ("text", "inside", "thought", "content"),
    [
        ("<think>\nhm</think>\n\nyes", False, "hm", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<thinking", False, "", "<thinking"),
        ("<thi", False, "", "<thi"),
        ("<think>cut o", False, "cut o", ""),
        ("<think>a</thin b</think>c</think>", False, "a</thin b", "c</think>"),
        ("", False, "", ""),
    ],
)
def test_splits(text, inside, thought, content):
    assert split(text, [len(text)], inside=inside) == (thought, content)
    assert split(text, [], inside=inside) == (thought, content)


pieces = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "think>", "\n", " ", "a", "bc"]), max_size=12)


@given(pieces.map("".join), st.lists(st.integers(1, 6), max_size=20), st.booleans())
def test_the_same_for_every_cut(text, cuts, inside):
    assert split(text, cuts, inside=inside) == split(text, [len(text) or 1], inside=inside)
