"""The tokens of crops of images are where the prompt has them, and a crop of another size is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.intake import placed_excerpts
from server.engine.step_model import SeeingLimits
from server.messages import Crop, SamplingParams, Submit

IMAGE, TEXT = 9, 1
EDGES = st.integers(1, 6)


def prompt_of(crop: Crop, before: int, *, has_breaks: bool) -> list[int]:
    row = [IMAGE] * crop.columns
    return [*[TEXT] * before, *row, *([*[TEXT] * has_breaks, *row] * (crop.rows - 1)), TEXT]


@given(EDGES, EDGES, st.integers(0, 5), st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_runs_are_the_tokens_between_two_positions(rows: int, columns: int, before: int, has_breaks: bool, start: int, count: int) -> None:
    limits = SeeingLimits(square_bytes=3, edge_tokens=1, token=IMAGE, cost=1, most_squares=36, has_breaks=has_breaks)
    crop = Crop.of(bytes(3 * rows * columns), rows, columns)
    ids = prompt_of(crop, before, has_breaks=has_breaks)
    (placed,) = placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=(crop,)), limits)
    runs = list(placed.runs(start, start + count))
    places = [position for position, token in enumerate(ids) if token == IMAGE]
    wanted = [(position, row) for row, position in enumerate(places) if start <= position < start + count]
    assert [(first + at, row + at) for first, length, row in runs for at in range(length)] == wanted
    assert all(length > 0 for _, length, _ in runs)


@pytest.mark.parametrize(
    ("rows", "columns", "num_bytes", "text"),
    [
        (2, 2, 48, ""),
        (2, 4, 96, ""),
        (2, 3, 72, "2 rows and 3 columns of tokens; expected multiples of 2, at most 8 tokens"),
        (4, 4, 192, "4 rows and 4 columns of tokens; expected multiples of 2, at most 8 tokens"),
        (0, 4, 0, "0 rows and 4 columns"),
        (2, -2, 0, "2 rows and -2 columns"),
        (2, 2, 96, "a crop has 96 bytes; expected 48"),
    ],
)
def test_a_crop_of_another_size_is_refused(rows: int, columns: int, num_bytes: int, text: str) -> None:
    limits = SeeingLimits(square_bytes=48, edge_tokens=2, token=IMAGE, cost=1, most_squares=2)
    assert (
        text in limits.fault(Crop.of(bytes(num_bytes), rows, columns))
        if text
        else not limits.fault(Crop.of(bytes(num_bytes), rows, columns))
    )


@pytest.mark.parametrize(("most_squares", "edge"), [(1, 1), (8, 2), (1024, 16)])
def test_the_cost_of_a_crop_is_in_proportion_to_its_tokens(most_squares: int, edge: int) -> None:
    limits = SeeingLimits(square_bytes=12, edge_tokens=3, token=IMAGE, cost=1, most_squares=most_squares)
    assert (limits.example.rows, limits.example.columns) == (3 * edge, 3 * edge)
    assert limits.fault(limits.example) == ""
    assert (limits.share(limits.example.num_tokens), limits.share(limits.example.num_tokens * 2)) == (1, 2)
