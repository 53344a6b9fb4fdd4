"""The coordinates of tokens are those of the models' authors, whichever part of a sequence is asked for."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.engine.axes import axes_of
from server.engine.intake import placed_excerpts
from server.engine.request import PlacedExcerpt
from server.engine.step_model import SeeingLimits
from server.messages import Crop, SamplingParams, Submit

IMAGE, TEXT = 9, 1
SEEING = SeeingLimits(square_bytes=3, edge_tokens=1, token=IMAGE, cost=1, most_squares=36, three_axes=True)
Part = int | tuple[int, int]  # a number of tokens of text, or the rows and columns of an image


def prompt_of(parts: list[Part]) -> tuple[int, tuple[PlacedExcerpt, ...]]:
    """Return the number of tokens of a prompt, and its crops."""
    crops = tuple(Crop.of(bytes(3 * part[0] * part[1]), *part) for part in parts if isinstance(part, tuple))
    ids = [token for part in parts for token in ([TEXT] * part if isinstance(part, int) else [IMAGE] * (part[0] * part[1]))]
    return len(ids), placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=crops), SEEING)


def expected(parts: list[Part]) -> list[list[int]]:
    """Return the coordinates as the authors of Qwen2-VL define them."""
    found: list[list[int]] = []
    begin = 0
    for part in parts:
        if isinstance(part, int):
            found += [[begin + number] * 3 for number in range(part)]
            begin += part
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


PARTS = st.lists(st.integers(0, 5) | st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=7)


@given(PARTS, st.lists(st.integers(1, 9), max_size=9))
def test_coordinates_of_chunks_are_those_of_the_whole(parts: list[Part], chunks: list[int]) -> None:
    parts = [*parts, 4]
    length, crops = prompt_of(parts)
    starts = [start for start in accumulate(chunks, initial=0) if start < length]
    found = [axes_of(crops, start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), expected(parts))
