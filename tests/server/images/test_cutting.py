"""Images are cut as transformers cuts them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from server.images.cutting import Grid, Plan, crops_of, divisible_size, scaled_size
from tests.golden.make_idefics3 import CROP, LONGEST, SIZES, shown
from tests.server.images.files import image

ARRAYS = dict(np.load(Path(__file__).parents[2] / "golden" / "idefics3" / "golden.npz"))


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_crops_are_the_bytes_of_transformers(number: int) -> None:
    file = ARRAYS[f"image_{number}"].tobytes()
    grid, crops = crops_of(shown(file), Plan(CROP, LONGEST, splits=True))
    expected = ARRAYS[f"crops_{number}"]
    assert len(crops) == len(expected) == grid.rows * grid.columns + 1
    for found, wanted in zip(crops, expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(found, np.uint8).reshape(wanted.shape), wanted)


def test_without_splitting_there_is_only_the_whole() -> None:
    grid, (whole,) = crops_of(image(100, 40), Plan(16, 64, splits=False))
    assert (grid, len(whole)) == (Grid(0, 0), 16 * 16 * 3)


def test_an_image_of_one_crop_is_not_split() -> None:
    grid, crops = crops_of(image(100, 100), Plan(16, 16, splits=True))
    assert (grid, len(crops)) == (Grid(0, 0), 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1), (3, 2), (4095, 4096), (513, 512), (40_000, 1_000)])
def test_any_size_becomes_crops(size: tuple[int, int]) -> None:
    scaled = scaled_size(size, 2048)
    assert max(scaled) == 2048 and min(scaled) >= 1
    divisible = divisible_size(scaled, 512)
    assert all(edge % 512 == 0 and 512 <= edge <= 2048 for edge in divisible)


def test_a_line_of_pixels() -> None:
    grid, crops = crops_of(Image.open(io.BytesIO(_line())).convert("RGB"), Plan(16, 64, splits=True))
    assert (grid.rows, grid.columns, len(crops)) == (1, 4, 5)


def _line() -> bytes:
    out = io.BytesIO()
    Image.new("L", (1000, 1)).save(out, "PNG")
    return out.getvalue()
