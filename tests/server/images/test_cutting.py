"""Images are cut as transformers cuts them."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from server.images.cutting import CuttingFault, Grid, Plan, best_grid, crops_of, divisible_size, filled_size, free_size, scaled_size
from server.messages import Fit
from tests.golden.crops import crop_of, pixels_of
from tests.golden.make_vision import shown
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import SIZES
from tests.server.images.files import image

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
PLANS = {
    "idefics3": Plan(48, 3, Fit.TILES, LANCZOS, 144, splits=True),
    "gemma3": Plan(48, 3, Fit.STRETCHED, BILINEAR),
    "llava": Plan(48, 3, Fit.CENTRE, BICUBIC),
    "llava_siglip": Plan(52, 3, Fit.STRETCHED, BICUBIC),
    "internvl": Plan(48, 3, Fit.GRID, BICUBIC, splits=True, most_crops=4),
    "qwen2_vl": Plan(16, 1, Fit.FREE, BICUBIC, least_pixels=12 * 256, most_pixels=40 * 256),
}


PLANS["mistral3"] = Plan(16, 1, Fit.CAPPED, BICUBIC, longest_edge=96)
PLANS["pixtral"] = Plan(8, 1, Fit.CAPPED, BICUBIC, longest_edge=50)
PLANS["gemma4"] = PLANS["gemma4_both_ways"] = Plan(16, 1, Fit.FILLED, BICUBIC, most_pixels=70 * 256)
PLANS["lfm2_vl"] = Plan(
    *(16, 1, Fit.MIXED, BILINEAR),
    splits=True,
    most_crops=4,
    least_pixels=12 * 256,
    most_pixels=40 * 256,
    least_crops=2,
    tile_edge=48,
    unsplit_pixels=44 * 256,
)
PLANS["qwen2_5_vl"] = PLANS["qwen3_vl"] = PLANS["qwen2_vl"]


@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("name", SUBJECTS)
def test_crops_are_the_bytes_of_transformers(name: str, number: int) -> None:
    grid, crops = crops_of(shown(SUBJECTS[name].files[number]), PLANS[name])
    expected = pixels_of(SUBJECTS[name], number)
    assert len(crops) == len(expected) == grid.rows * grid.columns + 1  # the crops, and that of the whole
    for found, wanted in zip(crops, expected, strict=True):
        if name == "lfm2_vl":  # whose processor scales by torchvision, which rounds otherwise than Pillow
            apart = np.frombuffer(found.pixels, np.uint8).reshape(wanted.shape).astype(int) - wanted
            assert np.abs(apart).max() <= 1 and np.abs(apart).mean() < 0.2
            assert (found.rows, found.columns) == (crop_of(SUBJECTS[name], wanted).rows, crop_of(SUBJECTS[name], wanted).columns)
        else:
            np.testing.assert_array_equal(np.frombuffer(found.pixels, np.uint8).reshape(wanted.shape), wanted)
            assert found == crop_of(SUBJECTS[name], wanted)


def test_without_splitting_there_is_only_the_whole() -> None:
    grid, (whole,) = crops_of(image(100, 40), Plan(16, 1, Fit.TILES, LANCZOS, 64))
    assert (grid, len(whole.pixels)) == (Grid(0, 0), 16 * 16 * 3)


def test_an_image_of_one_crop_is_not_split() -> None:
    grid, crops = crops_of(image(100, 100), Plan(16, 1, Fit.TILES, LANCZOS, 16, splits=True))
    assert (grid, len(crops)) == (Grid(0, 0), 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1), (3, 2), (4095, 4096), (513, 512), (40_000, 1_000)])
def test_any_size_becomes_crops(size: tuple[int, int]) -> None:
    scaled = scaled_size(size, 2048)
    assert max(scaled) == 2048 and min(scaled) >= 1
    divisible = divisible_size(scaled, 512)
    assert all(edge % 512 == 0 and 512 <= edge <= 2048 for edge in divisible)


def test_a_line_of_pixels() -> None:
    grid, crops = crops_of(Image.open(io.BytesIO(_line())).convert("RGB"), Plan(16, 1, Fit.TILES, LANCZOS, 64, splits=True))
    assert (grid.rows, grid.columns, len(crops)) == (1, 4, 5)


@pytest.mark.parametrize(
    ("size", "most", "shape"),
    [
        ((448, 448), 12, (1, 1)),
        ((900, 900), 12, (2, 2)),
        ((1600, 800), 12, (2, 4)),
        ((500, 250), 12, (1, 2)),
        ((1, 5000), 12, (12, 1)),
        ((3000, 2000), 6, (2, 3)),
    ],
)
def test_a_grid_has_the_proportions_of_the_image(size: tuple[int, int], most: int, shape: tuple[int, int]) -> None:
    assert best_grid(size, 448, most) == Grid(*shape)


@pytest.mark.parametrize("size", [(1, 1), (1, 9_999), (9_999, 1), (335, 337), (672, 336), (2, 3), (100, 6_400), (100, 6_401)])
def test_any_image_has_a_middle(size: tuple[int, int]) -> None:
    whole, shorter = Image.new("RGB", size, "red"), min(size)
    x, y = ((edge - shorter) // 2 for edge in size)
    whole.paste("blue", (x, y, x + shorter, y + shorter))
    _, (crop,) = crops_of(whole, Plan(48, 3, Fit.CENTRE, BICUBIC))
    assert len(crop.pixels) == 48 * 48 * 3
    red, _, blue = np.frombuffer(crop.pixels, np.uint8).reshape(-1, 3).mean(axis=0)
    assert blue > 1.5 * red


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1280, 720), (1288, 728)),  # nearest multiples of 28
        ((42, 70), (56, 56)),  # 1.5 and 2.5 squares become the even number
        ((10, 10), (56, 56)),
        ((28, 14), (84, 56)),  # half a square is none, so the image is enlarged
        ((1, 200), (28, 812)),
        ((10_000, 50), (9996, 56)),
        ((4000, 3000), (1148, 840)),
    ],
)
def test_sizes_that_keep_their_proportions(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert free_size(size, 28, 56 * 56, 1280 * 28 * 28) == expected
    assert free_size(size[::-1], 28, 56 * 56, 1280 * 28 * 28) == expected[::-1]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1000, 1000), (768, 768)),  # 280 squares of 48 pixels are 803 by 803 pixels
        ((10, 10), (768, 768)),
        ((4000, 3000), (912, 672)),
        ((300, 1), (48 * 280, 48)),
        ((279, 1), (48 * 279, 48)),
        ((281, 1), (48 * 280, 48)),
        ((60_000, 1), (48 * 280, 48)),
        ((200, 1), (48 * 236, 48)),
    ],
)
def test_sizes_with_as_many_squares_as_allowed(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert filled_size(size, 48, 280 * 48 * 48) == expected
    assert filled_size(size[::-1], 48, 280 * 48 * 48) == expected[::-1]
    assert expected[0] * expected[1] <= 280 * 48 * 48


def test_an_image_that_is_too_long_is_refused() -> None:
    with pytest.raises(CuttingFault, match="it has 201 x 1 pixels; expected edges of which none is 200 times"):
        crops_of(image(201, 1), PLANS["qwen2_vl"])


@pytest.mark.parametrize(
    ("size", "shape", "whole"),
    [
        ((512, 512), (0, 0), (16, 16)),
        ((740, 700), (0, 0), (15, 16)),  # rounded, it has less than twice the pixels that one crop may have
        ((752, 720), (2, 2), (15, 16)),
        ((1024, 512), (0, 0), (11, 22)),
        ((4000, 3000), (2, 3), (13, 18)),
        ((3000, 20), (0, 0), (1, 94)),
        ((40, 30), (0, 0), (7, 10)),
    ],
)
def test_a_large_image_is_a_grid_and_the_whole(size: tuple[int, int], shape: tuple[int, int], whole: tuple[int, int]) -> None:
    plan = Plan(
        *(32, 1, Fit.MIXED, BILINEAR),
        splits=True,
        most_crops=10,
        least_pixels=64 << 10,
        most_pixels=256 << 10,
        least_crops=2,
        tile_edge=512,
        unsplit_pixels=512 << 10,
    )
    grid, crops = crops_of(image(*size), plan)
    assert (grid.rows, grid.columns) == shape
    assert (crops[-1].rows, crops[-1].columns) == whole
    assert {(crop.rows, crop.columns) for crop in crops[:-1]} <= {(16, 16)} and len(crops) == 1 + grid.rows * grid.columns
    assert len(crops_of(image(*size), replace(plan, shows_whole=False))[1]) == (grid.rows * grid.columns or 1)
    assert crops_of(image(*size), replace(plan, splits=False))[1] == crops[-1:]


def _line() -> bytes:
    out = io.BytesIO()
    Image.new("L", (1000, 1)).save(out, "PNG")
    return out.getvalue()
