"""Decode images for the front: every image is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import IMAGE_NOT_DECODED, INVALID_IMAGE
from server.fetching import Fetcher
from server.images.cutting import Plan
from server.images.decoding import Decoding, File, Outcome
from server.isolated.files import FileCalls
from server.isolated.held import HeldBytes
from server.messages import Crop

PATIENCE_S = 60.0  # seconds to wait for an answer of the process that decodes


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a model sees it: the crops of a grid of `rows` times `columns`, if there is one, then a crop of the whole image, if the
    model sees one."""

    rows: int
    columns: int
    crops: Sequence[Crop]

    @property
    def num_tokens(self) -> int:
        """The number of image tokens of all crops."""
        return sum(crop.num_tokens for crop in self.crops)


class ImageDecoder:
    """Decodes images, and limits the pixels that requests hold."""

    def __init__(self, most_pixels: int, most_held_bytes: int, fetcher: Fetcher) -> None:
        """An image may have at most `most_pixels` pixels. Once requests hold `most_held_bytes` of pixels together, no more images are
        decoded."""
        self.held = HeldBytes(most_held_bytes, names="images", setting="max_held_image_bytes", refused=IMAGE_NOT_DECODED)
        self._fetcher = fetcher
        self._calls = FileCalls(Decoding(most_pixels), Outcome, PATIENCE_S, invalid=INVALID_IMAGE, not_decoded=IMAGE_NOT_DECODED)

    async def decode(self, url: str, plan: Plan, param: str) -> Picture:
        """Return the image in a `data:` URL, or at a URL of a host that the operator allows, and count its pixels. Raise ApiError if the
        image cannot be fetched or decoded, or if requests hold too many pixels. `param` is the field with the URL."""
        self.held.require_room(param)
        given = await self._fetcher.given(url, param)
        file = File(given, plan) if isinstance(given, str) else File("", plan, given)
        outcome = await self._calls.decode(file, param)
        self.held.hold(outcome.crops, param)
        return Picture(outcome.rows, outcome.columns, outcome.crops)
