"""Images are cut as transformers cuts them."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as with_fields
from PIL import Image

from runtime.fits import Canvas, Capped, Centre, Filled, Free, Grid, Mixed, Naflex, Stretched, Tiles
from server.images.cutting import Plan, crops_of
from server.images.sizes import (
    CuttingFault,
    Shape,
    best_canvas,
    best_grid,
    divisible_size,
    filled_size,
    free_size,
    naflex_size,
    scaled_size,
    size_within,
)
from tests.golden import joint
from tests.golden.crops import crop_of, pixels_of
from tests.golden.make_vision import shown
from tests.golden.media import SIZES
from tests.golden.vision import SUBJECTS
from tests.server.images.files import image

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
FREE, GLM = (Free(least_pixels=12 * 256, most_pixels=40 * 256, enlarges_edges=enlarges) for enlarges in (False, True))
FILLED = Filled(70 * 256)
LFM2 = Mixed(least_pixels=12 * 256, most_pixels=40 * 256, splits=True, least_crops=2, most_crops=4, tile_edge=48, unsplit_pixels=44 * 256)
PLANS = {
    "idefics3": Plan(48, 3, Tiles(longest_edge=144), LANCZOS),
    "gemma3": Plan(48, 3, Stretched(), BILINEAR),
    "llava": Plan(48, 3, Centre(), BICUBIC),
    "llava_siglip": Plan(52, 3, Stretched(), BICUBIC),
    "internvl": Plan(48, 3, Grid(most_crops=4), BICUBIC),
    "llama4": Plan(48, 3, Canvas(most_crops=6), BILINEAR),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), Plan(16, 1, FREE, BICUBIC)),
    **dict.fromkeys(("glm4v", "glm4v_moe"), Plan(16, 1, GLM, BICUBIC)),
    "mistral3": Plan(16, 1, Capped(96), BICUBIC),
    "pixtral": Plan(8, 1, Capped(50), BICUBIC),
    **dict.fromkeys(("gemma4", "gemma4_both_ways"), Plan(16, 1, FILLED, BICUBIC)),
    "lfm2_vl": Plan(16, 1, LFM2, BILINEAR),
}
SIGLIP2 = Plan(8, 1, Naflex(60), BILINEAR)
OF_TORCHVISION = ("lfm2_vl", "llama4")  # families whose processors scale by torchvision, which rounds otherwise than Pillow


@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("name", SUBJECTS)
def test_crops_are_the_bytes_of_transformers(name: str, number: int) -> None:
    grid, crops = crops_of(shown(SUBJECTS[name].files[number]), PLANS[name])
    expected = pixels_of(SUBJECTS[name], number)
    assert len(crops) == len(expected) == grid.rows * grid.columns + 1  # the crops, and that of the whole
    for found, wanted in zip(crops, expected, strict=True):
        if name in OF_TORCHVISION:
            apart = np.frombuffer(found.pixels, np.uint8).reshape(wanted.shape).astype(int) - wanted
            assert np.abs(apart).max() <= 1 and np.abs(apart).mean() < 0.2
            assert (found.rows, found.columns) == (crop_of(SUBJECTS[name], wanted).rows, crop_of(SUBJECTS[name], wanted).columns)
        else:
            np.testing.assert_array_equal(np.frombuffer(found.pixels, np.uint8).reshape(wanted.shape), wanted)
            assert found == crop_of(SUBJECTS[name], wanted)


def test_without_splitting_there_is_only_the_whole() -> None:
    grid, (whole,) = crops_of(image(100, 40), Plan(16, 1, Tiles(longest_edge=64, splits=False), LANCZOS))
    assert (grid, len(whole.pixels)) == (Shape(0, 0), 16 * 16 * 3)


def test_an_image_of_one_crop_is_not_split() -> None:
    grid, crops = crops_of(image(100, 100), Plan(16, 1, Tiles(longest_edge=16), LANCZOS))
    assert (grid, len(crops)) == (Shape(0, 0), 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1), (3, 2), (4095, 4096), (513, 512), (40_000, 1_000)])
def test_any_size_becomes_crops(size: tuple[int, int]) -> None:
    scaled = scaled_size(size, 2048)
    assert max(scaled) == 2048 and min(scaled) >= 1
    divisible = divisible_size(scaled, 512)
    assert all(edge % 512 == 0 and 512 <= edge <= 2048 for edge in divisible)


def test_a_line_of_pixels() -> None:
    grid, crops = crops_of(Image.open(io.BytesIO(_line())).convert("RGB"), Plan(16, 1, Tiles(longest_edge=64), LANCZOS))
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
    assert best_grid(size, 448, most) == Shape(*shape)


@pytest.mark.parametrize("size", [(1, 1), (1, 9_999), (9_999, 1), (335, 337), (672, 336), (2, 3), (100, 6_400), (100, 6_401)])
def test_any_image_has_a_middle(size: tuple[int, int]) -> None:
    whole, shorter = Image.new("RGB", size, "red"), min(size)
    x, y = ((edge - shorter) // 2 for edge in size)
    whole.paste("blue", (x, y, x + shorter, y + shorter))
    _, (crop,) = crops_of(whole, Plan(48, 3, Centre(), BICUBIC))
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


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_images_that_are_embedded_are_the_bytes_of_transformers(number: int) -> None:
    wanted = joint.SUBJECTS["siglip2"].arrays[f"crop_{number}"]
    _, (crop,) = crops_of(shown(joint.SUBJECTS["siglip2"].files[number]), SIGLIP2)
    assert (crop.rows * 8, crop.columns * 8, 3) == wanted.shape
    np.testing.assert_array_equal(np.frombuffer(crop.pixels, np.uint8).reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (288, 224)),
        ((1000, 1000), (256, 256)),
        ((3, 2), (304, 208)),
        ((1, 1), (112, 112)),  # an image is enlarged a hundred times at most
        ((100_000, 1), (4096, 16)),
        ((16 * 256, 1), (4096, 16)),
    ],
)
def test_sizes_with_as_many_patches_as_allowed(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert naflex_size(size, 16, 256) == expected
    assert naflex_size(size[::-1], 16, 256) == expected[::-1]


@pytest.mark.parametrize(
    ("size", "shape", "inner"),
    [
        ((100, 80), (1, 1), (336, 268)),
        ((336, 336), (1, 1), (336, 336)),
        ((337, 336), (1, 2), (337, 336)),
        ((672, 600), (2, 2), (672, 600)),
        ((400, 1300), (4, 2), (400, 1300)),
        ((4000, 3000), (3, 4), (1344, 1008)),  # it must be reduced
        ((60_000, 1), (1, 16), (5376, 1)),
    ],
)
def test_an_image_lies_on_the_smallest_canvas_that_reduces_it_least(
    size: tuple[int, int], shape: tuple[int, int], inner: tuple[int, int]
) -> None:
    found = best_canvas(size, 336, 16)
    assert found == Shape(*shape)
    canvas = found.columns * 336, found.rows * 336
    most = (min(max(size[0], 336), canvas[0]), min(max(size[1], 336), canvas[1]))
    assert size_within(size, most) == inner


def test_a_canvas_on_which_an_image_is_largest() -> None:
    assert best_canvas((336, 336), 336, 16, enlarges=True) == Shape(4, 4)
    grid, crops = crops_of(Image.new("RGB", (8, 6), "white"), Plan(16, 1, Canvas(most_crops=4, enlarges=True), BILINEAR))
    assert (grid, len(crops)) == (Shape(2, 2), 5)
    assert [min(crop.pixels) for crop in crops] == [255, 255, 0, 0, 255]  # what is beyond the image is black


@pytest.mark.parametrize("size", [(15, 30), (1, 199), (20, 3)])
def test_a_narrow_image_is_first_enlarged(size: tuple[int, int]) -> None:
    """The expected sizes are those of GLM-4.1V's processor. Before it rounds, it enlarges an image whose shorter edge has less than 28
    pixels."""
    edges = {(15, 30): (56, 84), (1, 199): (28, 5572), (20, 3): (196, 28)}
    assert free_size(size, 28, 56 * 56, 6144 * 28 * 28, enlarges_edges=True) == edges[size]


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
    fit = Mixed(
        least_pixels=64 << 10, most_pixels=256 << 10, splits=True, least_crops=2, most_crops=10, tile_edge=512, unsplit_pixels=512 << 10
    )
    plan = Plan(32, 1, fit, BILINEAR)
    grid, crops = crops_of(image(*size), plan)
    assert (grid.rows, grid.columns) == shape
    assert (crops[-1].rows, crops[-1].columns) == whole
    assert {(crop.rows, crop.columns) for crop in crops[:-1]} <= {(16, 16)} and len(crops) == 1 + grid.rows * grid.columns
    assert len(crops_of(image(*size), replace(plan, fit=with_fields(fit, shows_whole=False)))[1]) == (grid.rows * grid.columns or 1)
    assert crops_of(image(*size), replace(plan, fit=with_fields(fit, splits=False)))[1] == crops[-1:]


def _line() -> bytes:
    out = io.BytesIO()
    Image.new("L", (1000, 1)).save(out, "PNG")
    return out.getvalue()
