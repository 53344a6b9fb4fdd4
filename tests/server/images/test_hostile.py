"""Damaged images are refused or decoded. They end no process but their own, and the next image is decoded."""

from __future__ import annotations

import asyncio
import random
from typing import get_args

import pytest

from runtime.fits import Canvas, Capped, Centre, Filled, Fit, Free, Grid, Mixed, Naflex, Stretched, Tiles
from server.errors import ApiError
from server.images.cutting import Plan
from server.images.decoder import ImageDecoder
from tests.server.audio.test_hostile import AT_ONCE
from tests.server.images.files import FORMATS, NOWHERE, data_url, encoded, image
from tests.server.mutations import damaged

MOST_SQUARES = 12
PIXELS = {"least_pixels": MOST_SQUARES * 128, "most_pixels": MOST_SQUARES * 256}
WAYS = (
    *(Tiles(longest_edge=32), Grid(most_crops=6), Canvas(most_crops=6), Stretched(), Centre(), Capped(48), Filled(MOST_SQUARES * 256)),
    *(Naflex(MOST_SQUARES), Free(**PIXELS), Free(**PIXELS, enlarges_edges=True)),
    Mixed(**PIXELS, splits=True, least_crops=2, most_crops=6, tile_edge=32, unsplit_pixels=1),
)


def plan_of(fit: Fit, edge: int = 16) -> Plan:
    return Plan(edge, 1, fit, filter=3)


def test_all_ways_are_here() -> None:
    assert {type(fit) for fit in WAYS} == set(get_args(Fit))


@pytest.mark.parametrize("fit", WAYS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [16, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_images(fit: Fit, format: str, count: int) -> None:
    whole = encoded(image(), format)

    async def outcome(decoder: ImageDecoder, data: bytes) -> str:
        try:
            picture = await decoder.decode(data_url(data), plan_of(fit), "url")
        except ApiError as error:
            assert error.kind.code == "invalid_image"
            return error.message
        assert len(picture.crops) == picture.rows * picture.columns + 1
        assert all(len(crop.pixels) == 768 * crop.num_tokens for crop in picture.crops)
        assert all(1 <= crop.num_tokens <= fit.most_squares(16) for crop in picture.crops)
        return ""

    async def check() -> list[str]:
        decoder, rng, gate = ImageDecoder(1_000_000, 1 << 30, NOWHERE), random.Random(format), asyncio.Semaphore(AT_ONCE)

        async def one(data: bytes) -> str:
            async with gate:
                return await outcome(decoder, data)

        found = await asyncio.gather(*(one(damaged(whole, rng)) for _ in range(count)))
        assert await outcome(decoder, whole) == ""
        return found

    found = asyncio.run(check())
    assert all(text.startswith("url cannot be decoded: ") for text in found if text)
    assert any(found)
    assert not any("Errno" in text for text in found)  # a call opens no files, not even to import a module


@pytest.mark.parametrize("fit", [fit for fit in WAYS if not isinstance(fit, Free)], ids=str)  # others refuse them: see test_cutting
@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_long_lines_of_pixels(fit: Fit, size: tuple[int, int]) -> None:
    """Each crop has 448 x 448 pixels per token. If a step enlarged such an image and kept its proportions, the image would be huge."""
    line = encoded(image(*size))

    async def check() -> None:
        picture = await ImageDecoder(1_000_000, 1 << 30, NOWHERE).decode(data_url(line), plan_of(fit, 448), "url")
        assert all(len(crop.pixels) == 448 * 448 * 3 * crop.num_tokens for crop in picture.crops)

    asyncio.run(check())
