"""The decoder of images as the front uses it: every image is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import IMAGE_NOT_DECODED, INVALID_IMAGE, ApiError
from server.fetching import Fetcher
from server.images.cutting import Plan
from server.images.decoding import Decoding, File, Outcome
from server.isolated.files import FileCalls
from server.messages import Crop

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a model sees it: `rows` times `columns` crops, and one of the whole."""

    rows: int
    columns: int
    crops: Sequence[Crop]

    @property
    def num_tokens(self) -> int:
        return sum(crop.num_tokens for crop in self.crops)


class ImageDecoder:
    """Decodes images, and counts the pixels that requests hold: those that run or wait keep theirs, because a worker may die."""

    def __init__(self, most_pixels: int, most_held_bytes: int, fetcher: Fetcher) -> None:
        self.num_held_bytes = 0
        self._fetcher = fetcher
        self._most_held_bytes = most_held_bytes
        self._calls = FileCalls(Decoding(most_pixels), Outcome, PATIENCE_S, invalid=INVALID_IMAGE, not_decoded=IMAGE_NOT_DECODED)

    async def decode(self, url: str, plan: Plan, param: str) -> Picture:
        """Return the image at a URL: its data, or a file on a host that the operator allows. Raise ApiError if there is none; `param` is
        the field with the URL."""
        if self.num_held_bytes >= self._most_held_bytes:
            held = f"the running and waiting requests hold {self.num_held_bytes >> 20} MiB of images (max_held_image_bytes)"
            raise ApiError(IMAGE_NOT_DECODED, f"{param} was not decoded, because {held}; try again later", param=param)
        given = await self._fetcher.given(url, param)
        file = File(given, plan) if isinstance(given, str) else File("", plan, given)
        outcome = await self._calls.decode(file, param)
        for crop in outcome.crops:
            self._count(len(crop.pixels))
            weakref.finalize(crop, self._count, -len(crop.pixels)).atexit = False
        return Picture(outcome.rows, outcome.columns, outcome.crops)

    def _count(self, num_bytes: int) -> None:
        self.num_held_bytes += num_bytes
