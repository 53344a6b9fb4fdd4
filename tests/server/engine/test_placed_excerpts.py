"""The tokens of crops of images are where the prompt has them, and a crop of another size is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.engine.intake import placed_excerpts
from server.engine.request import among, num_before
from server.engine.step_model import ListeningLimits, SeeingLimits
from server.interfaces import RequestError
from server.messages import Clip, Crop, Excerpt, SamplingParams, Submit

IMAGE, AUDIO, TEXT = 9, 8, 1
EDGES = st.integers(1, 6)


def prompt_of(crop: Crop, before: int, *, has_breaks: bool) -> list[int]:
    row = [IMAGE] * crop.columns
    return [*[TEXT] * before, *row, *([*[TEXT] * has_breaks, *row] * (crop.rows - 1)), TEXT]


@given(EDGES, EDGES, st.integers(0, 5), st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_runs_are_the_tokens_between_two_positions(rows: int, columns: int, before: int, has_breaks: bool, start: int, count: int) -> None:
    limits = SeeingLimits(square_bytes=3, edge_tokens=1, token=IMAGE, cost=1, most_squares=36, has_breaks=has_breaks)
    crop = Crop.of(bytes(3 * rows * columns), rows, columns)
    ids = prompt_of(crop, before, has_breaks=has_breaks)
    (placed,) = placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=(crop,)), (limits,))
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


BOTH = (
    SeeingLimits(square_bytes=3, edge_tokens=1, token=IMAGE, cost=1, most_squares=36),
    ListeningLimits(num_hops=100, frames_each=1, token=AUDIO, cost=1, ends=True),
)
CROP, CLIP = Crop.of(bytes(6), 1, 2), Clip.of(b"", 0.0, 6, 3)


def placed(ids: list[int], *excerpts: Excerpt) -> list[tuple[int, int]]:
    found = placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=excerpts), BOTH)
    return [(one.start, one.stop) for one in found]


def test_images_and_recordings_take_their_places_in_any_order() -> None:
    image, audio = [IMAGE] * 2, [AUDIO] * 3
    assert placed([TEXT, *image, *audio, TEXT, *image], CROP, CLIP, CROP) == [(1, 3), (3, 6), (7, 9)]
    assert placed([*audio, *audio, *image], CLIP, CLIP, CROP) == [(0, 3), (3, 6), (6, 8)]


@pytest.mark.parametrize(
    ("ids", "excerpts", "text"),
    [
        ([*[IMAGE] * 2, *[AUDIO] * 3], (CLIP, CROP), "audio tokens from 0 to 3 have others between them"),
        ([IMAGE, *[AUDIO] * 3, IMAGE], (CROP, CLIP), "image tokens from 0 to 2 have others between them"),
        ([*[IMAGE] * 2, *[AUDIO] * 2], (CROP, CLIP), r"2 audio tokens \(8\); 1 clips of recordings take 3"),
        ([*[IMAGE] * 3, *[AUDIO] * 3], (CROP, CLIP), r"3 image tokens \(9\); 1 crops of images take 2"),
        ([AUDIO], (), "1 audio tokens"),
    ],
)
def test_tokens_of_another_kind_or_number_are_refused(ids: list[int], excerpts: tuple[Excerpt, ...], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        placed(ids, *excerpts)


def test_a_kind_that_the_model_does_not_read_is_refused() -> None:
    for limits, excerpt, text in (
        (BOTH[:1], CLIP, "the request has audio, and this model sees images and reads text"),
        (BOTH[1:], CROP, "the request has images, and this model hears audio and reads text"),
        ((), CROP, "the request has images, and this model reads text"),
    ):
        with pytest.raises(RequestError, match=text):
            placed_excerpts(Submit("r", (TEXT,), SamplingParams(1), excerpts=(excerpt,)), limits)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=8), st.integers(0, 40), st.integers(0, 40))
@example([(0, 2)], 1, 0)  # no positions, in the middle of an excerpt
def test_excerpts_among_positions_are_those_with_tokens_there(parts: list[tuple[int, int]], start: int, count: int) -> None:
    """`parts` has, for each recording, the number of text tokens before it and the number of its own tokens."""
    ids = [token for before, own in parts for token in [TEXT] * before + [AUDIO] * own]
    clips = tuple(Clip.of(b"", 0.0, 2 * own, own) for _, own in parts)
    found = placed_excerpts(Submit("r", tuple(ids), SamplingParams(1), excerpts=clips), BOTH)
    wanted = [one for one in found if any(start <= position < start + count for position in range(one.start, one.stop))]
    assert list(among(found, start, start + count)) == wanted
    assert num_before(found, start) == sum(one.stop <= start for one in found)
