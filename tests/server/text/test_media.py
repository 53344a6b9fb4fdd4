"""Images and recordings are written into one prompt in any order, and nothing that a client writes can take the place of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.text.media import Markers, Senses


@dataclass(frozen=True)
class Picture:
    name: str


@dataclass(frozen=True)
class Sound:
    name: str


class Eyes:
    reads: ClassVar = Picture
    markers = Markers("<image>", "image", "images")

    def written(self, found: Picture) -> str:
        return f"[{found.name}]"


class Ears:
    reads: ClassVar = Sound
    markers = Markers("<audio>", "audio", "recordings")

    def written(self, found: Sound) -> str:
        return f"({found.name})"


BOTH, DEAF, BLIND, NONE = Senses((Eyes(), Ears())), Senses((Eyes(),)), Senses((Ears(),)), Senses(())
MIXED = [Picture("a"), Sound("b"), Sound("c"), Picture("d")]
MARKERS = {Picture: "<image>", Sound: "<audio>"}


@given(st.lists(st.sampled_from(MIXED), max_size=6), st.lists(st.sampled_from(["", "x", "<", "<image", "audio>"]), min_size=7, max_size=7))
def test_each_marker_becomes_what_it_stands_for(found: list[Any], texts: list[str]) -> None:
    prompt, wanted = texts[0], texts[0]
    for one, text in zip(found, texts[1:], strict=False):
        prompt += f"{MARKERS[type(one)]}{text}"
        wanted += f"{f'[{one.name}]' if isinstance(one, Picture) else f'({one.name})'}{text}"
    assert BOTH.filled(prompt, found) == (wanted, found)


def test_a_template_that_writes_audio_first_gets_what_it_asks_for() -> None:
    text, ordered = BOTH.filled("<audio><audio>:<image><image>", MIXED)
    assert text == "(b)(c):[a][d]"
    assert [one.name for one in ordered] == ["b", "c", "a", "d"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("<image><audio><audio>", "writes 1 images, and the messages have 2"),
        ("<image><image><audio><audio><audio>", "writes 3 recordings, and the messages have 2"),
        ("", "writes 0 images, and the messages have 2"),
    ],
)
def test_another_number_of_either_is_refused(prompt: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        BOTH.filled(prompt, MIXED)
    assert caught.value.param == "messages"


def test_a_text_keeps_the_marker_of_a_sense_that_the_model_lacks() -> None:
    assert DEAF.filled("<audio><image>", MIXED[:1]) == ("<audio>[a]", MIXED[:1])
    assert BLIND.filled("<audio><image>", MIXED[1:2]) == ("(b)<image>", MIXED[1:2])
    assert NONE.filled("<audio><image>", []) == ("<audio><image>", [])


def test_contents_become_parts_in_order() -> None:
    messages = [{"role": "user", "content": "a<image><audio>b<image>"}, {"role": "tool", "content": None}, {"role": "user", "content": "c"}]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "audio"}, {"type": "text", "text": "b"}, {"type": "image"}]
    assert BOTH.in_parts(messages) == [{"role": "user", "content": parts}, *messages[1:]]
    assert NONE.in_parts(messages) == messages
