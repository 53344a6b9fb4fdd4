"""Cut an image into the crops that a model sees, as the image processor of Idefics3 does.

The image is scaled so that its longer edge has a given number of pixels, then so that both edges are multiples of a crop's edge, and cut
into crops. A last crop shows the whole image. Pillow scales bytes with weights that are rounded to integers, so the pixels are the same on
every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_EDGE = 4096  # of an image before its edges become multiples of a crop's edge

Size = tuple[int, int]  # width and height


@dataclass(frozen=True, slots=True)
class Plan:
    """How images are cut."""

    crop_size: int  # pixels of an edge of a crop
    longest_edge: int
    splits: bool  # False: there is only the crop of the whole image


@dataclass(frozen=True, slots=True)
class Grid:
    """The crops of an image before the one that shows the whole; no rows and no columns if there are none."""

    rows: int
    columns: int


def scaled_size(size: Size, longest_edge: int) -> Size:
    """Return the size of an image whose longer edge is `longest_edge`. The shorter edge is rounded down, then up to an even number."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height += height % 2
    else:
        width, height = int(longest_edge * ratio), longest_edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MOST_EDGE:
        width, height = MOST_EDGE, int(MOST_EDGE / ratio)
    elif height > width and height > MOST_EDGE:
        width, height = int(MOST_EDGE * ratio), MOST_EDGE
    return max(width, 1), max(height, 1)


def divisible_size(size: Size, crop_size: int) -> Size:
    """Return the size rounded up to multiples of a crop's edge, first the longer edge, then the other one in proportion."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = ceil(width / crop_size) * crop_size
        return width, ceil(max(int(width / ratio), 1) / crop_size) * crop_size
    height = ceil(height / crop_size) * crop_size
    return ceil(max(int(height * ratio), 1) / crop_size) * crop_size, height


def crops_of(image: Image, plan: Plan) -> tuple[Grid, list[bytes]]:
    """Return the crops of an image in RGB: line by line, and at last the whole."""
    from PIL.Image import Resampling

    def resized(image: Image, size: Size) -> Image:
        return image if image.size == size else image.resize(size, Resampling.LANCZOS)

    edge = plan.crop_size
    image = resized(image, scaled_size(image.size, plan.longest_edge))
    if not plan.splits:
        return Grid(0, 0), [resized(image, (edge, edge)).tobytes()]
    size, grid = divisible_size(image.size, edge), Grid(0, 0)
    image, parts = resized(image, size), []
    if size != (edge, edge):
        grid = Grid(size[1] // edge, size[0] // edge)
        places = ((column * edge, row * edge) for row in range(grid.rows) for column in range(grid.columns))
        parts = [image.crop((x, y, x + edge, y + edge)).tobytes() for x, y in places]
    return grid, [*parts, resized(image, (edge, edge)).tobytes()]
