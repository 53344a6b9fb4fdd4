"""The coordinates of tokens are those of the models' authors, whichever part of a sequence is asked for."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.engine.axes import axes_of
from server.engine.intake import placed_excerpts
from server.engine.request import PlacedExcerpt
from server.engine.step_model import ListeningLimits, SeeingLimits
from server.messages import Clip, Crop, SamplingParams, Submit

IMAGE, AUDIO, TEXT = 9, 8, 1
SEEING = SeeingLimits(square_bytes=3, edge_tokens=1, token=IMAGE, cost=1, most_squares=36, three_axes=True)
LISTENING = ListeningLimits(num_hops=100, frames_each=1, token=AUDIO, cost=1, ends=True)
Part = int | str | tuple[int, int]  # a number of tokens of text, a text of as many letters as a recording has, or the edges of an image


def prompt_of(parts: list[Part]) -> tuple[int, tuple[PlacedExcerpt, ...]]:
    """Return the number of tokens of a prompt, and its crops and clips."""
    excerpts = list[Crop | Clip]()
    ids = list[int]()
    for part in parts:
        if isinstance(part, int):
            ids += [TEXT] * part
            continue
        token = AUDIO if isinstance(part, str) else IMAGE
        excerpts.append(
            Clip.of(b"", 0.0, 2 * len(part), len(part)) if isinstance(part, str) else Crop.of(bytes(3 * part[0] * part[1]), *part)
        )
        ids += [token] * excerpts[-1].num_tokens
    return len(ids), placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=tuple(excerpts)), (SEEING, LISTENING))


def expected(parts: list[Part]) -> list[list[int]]:
    """Return the coordinates as the authors of Qwen2-VL and Qwen2.5-Omni define them."""
    found: list[list[int]] = []
    begin = 0
    for part in parts:
        if isinstance(part, int | str):
            count = part if isinstance(part, int) else len(part)
            found += [[begin + number] * 3 for number in range(count)]
            begin += count
        else:
            rows, columns = part
            found += [[begin, begin + row, begin + column] for row in range(rows) for column in range(columns)]
            begin += max(part)
    return found


def test_an_image_takes_as_many_coordinates_as_its_longer_edge() -> None:
    length, crops = prompt_of([2, (2, 3), 2])
    wanted = [[0] * 3, [1] * 3, [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4], [5] * 3, [6] * 3]
    assert axes_of(crops, 0, length).tolist() == wanted


def test_a_prompt_without_images_has_its_positions() -> None:
    assert axes_of((), 5, 8).tolist() == [[5] * 3, [6] * 3, [7] * 3]


def test_audio_takes_as_many_coordinates_as_tokens() -> None:
    length, excerpts = prompt_of([1, "aa", (1, 3), "a", 1])
    wanted = [[0] * 3, [1] * 3, [2] * 3, [3, 3, 3], [3, 3, 4], [3, 3, 5], [6] * 3, [7] * 3]
    assert axes_of(excerpts, 0, length).tolist() == wanted


PARTS = st.lists(st.integers(0, 5) | st.sampled_from(["a", "aaa"]) | st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=7)


@given(PARTS, st.lists(st.integers(1, 9), max_size=9))
def test_coordinates_of_chunks_are_those_of_the_whole(parts: list[Part], chunks: list[int]) -> None:
    parts = [*parts, 4]
    length, crops = prompt_of(parts)
    starts = [start for start in accumulate(chunks, initial=0) if start < length]
    found = [axes_of(crops, start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), expected(parts))
