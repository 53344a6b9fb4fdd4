"""Damaged images are refused or decoded. They end no process but their own, and the next image is decoded."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from server.errors import ApiError
from server.images.cutting import Plan
from server.images.decoder import ImageDecoder
from server.messages import Fit
from tests.server.audio.test_hostile import AT_ONCE, damaged
from tests.server.images.files import FORMATS, NOWHERE, data_url, encoded, image

MOST_SQUARES = 12
PLANS = {
    Fit.TILES: Plan(16, 1, Fit.TILES, filter=1, longest_edge=32, splits=True),
    Fit.GRID: Plan(16, 1, Fit.GRID, filter=3, splits=True, most_crops=6),
    Fit.STRETCHED: Plan(16, 1, Fit.STRETCHED, filter=2),
    Fit.CENTRE: Plan(16, 1, Fit.CENTRE, filter=3),
    Fit.CAPPED: Plan(16, 1, Fit.CAPPED, filter=3, longest_edge=48),
    Fit.FREE: Plan(16, 1, Fit.FREE, filter=3, least_pixels=MOST_SQUARES * 128, most_pixels=MOST_SQUARES * 256),
}
PLANS[Fit.FILLED] = Plan(16, 1, Fit.FILLED, filter=3, most_pixels=MOST_SQUARES * 256)
PLANS[Fit.MIXED] = replace(PLANS[Fit.FREE], fit=Fit.MIXED, splits=True, most_crops=6, least_crops=2, tile_edge=32, unsplit_pixels=1)


@pytest.mark.parametrize("fit", Fit)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [16, pytest.param(2500, marks=pytest.mark.slow)])
def test_damaged_images(fit: Fit, format: str, count: int) -> None:
    whole = encoded(image(), format)

    async def outcome(decoder: ImageDecoder, data: bytes) -> str:
        try:
            picture = await decoder.decode(data_url(data), PLANS[fit], "url")
        except ApiError as error:
            assert error.kind.code == "invalid_image"
            return error.message
        assert len(picture.crops) == picture.rows * picture.columns + 1
        assert all(len(crop.pixels) == 768 * crop.num_tokens for crop in picture.crops)
        most = {Fit.FREE: MOST_SQUARES, Fit.FILLED: MOST_SQUARES, Fit.MIXED: MOST_SQUARES, Fit.CAPPED: 9}.get(fit, 1)
        assert all(1 <= crop.num_tokens <= most for crop in picture.crops)
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


@pytest.mark.parametrize("fit", sorted(set(Fit) - {Fit.FREE, Fit.MIXED}))  # which refuse them: see test_cutting
@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_long_lines_of_pixels(fit: Fit, size: tuple[int, int]) -> None:
    """No step makes an image of all proportions large."""
    line = encoded(image(*size))

    async def check() -> None:
        picture = await ImageDecoder(1_000_000, 1 << 30, NOWHERE).decode(data_url(line), replace(PLANS[fit], crop_size=448), "url")
        assert all(len(crop.pixels) == 448 * 448 * 3 * crop.num_tokens for crop in picture.crops)

    asyncio.run(check())
