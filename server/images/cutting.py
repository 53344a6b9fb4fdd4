"""Cut an image into the crops that a model sees, as the image processors of transformers do.

For Idefics3, the image is scaled so that its longer edge has a given number of pixels, then so that both edges are multiples of a crop's
edge, and cut into crops. For InternVL, it is scaled to the grid of crops that fits its proportions best. In both, a last crop shows the
whole image. For Qwen2-VL, Pixtral and Gemma 4, the image is one crop, whose edges are multiples of the edge of the square that an image
token stands for. LFM2-VL sees such a crop; before it, if the image is large, a grid of square tiles, which are crops, too. Other models
see one crop of a fixed size: the whole image, or its middle. Pillow scales bytes with weights that are rounded to integers, so the pixels
are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, prod, sqrt
from typing import TYPE_CHECKING

from server.messages import Crop, Fit

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_EDGE = 4096  # maximum edge of an image, in pixels, before its edges become multiples of a crop's edge
MOST_RATIO = 64  # maximum ratio of the edges of an image that is scaled as a whole before its middle is cut out
MOST_FREE_RATIO = 200  # maximum ratio of the edges of an image that keeps its proportions
LOW_EDGE = 16  # with detail `low`, an image that keeps its proportions has at most LOW_EDGE * LOW_EDGE squares

Size = tuple[int, int]  # width and height


class CuttingFault(ValueError):
    """Raised for an image that cannot be brought to the size of crops. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How images are cut."""

    crop_size: int  # pixels of an edge of a crop; with FREE, CAPPED, FILLED or MIXED, the edges of a crop are multiples of it
    edge_tokens: int  # number of rows, and of columns, of image tokens for a square of crop_size pixels
    fit: Fit
    filter: int  # Pillow's number of the filter that scales images
    longest_edge: int = 0  # with TILES: the longer edge to which an image is scaled; with CAPPED: an image with a longer one is reduced
    splits: bool = False  # whether images are cut into several crops; False: the only crop is that of the whole image
    most_crops: int = 1  # with GRID or MIXED: maximum number of crops of an image, without that of the whole image
    least_pixels: int = 0  # with FREE or MIXED: an image with fewer pixels is enlarged
    most_pixels: int = 0  # with FREE or MIXED: an image with more pixels is reduced; with FILLED: an image is scaled to nearly so many
    least_crops: int = 1  # with MIXED: minimum number of crops of a large image, without that of the whole image
    shows_whole: bool = True  # with MIXED: whether the crop of the whole image follows the tiles of a large image
    tile_edge: int = 0  # with MIXED: pixels of an edge of the tiles of a large image
    unsplit_pixels: int = 0  # with MIXED: an image is large if it has more pixels, after its edges are rounded to multiples of crop_size

    def crop(self, image: Image) -> Crop:
        """Return the crop that consists of all pixels of this image."""
        return Crop.of(image.tobytes(), *(edge // self.crop_size * self.edge_tokens for edge in (image.height, image.width)))


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of rows and columns of the crops that precede the crop of the whole image; both are 0 if there are none."""

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
    """Round the longer edge of a size up to a multiple of a crop's edge, scale the other edge in proportion, and round it up, too."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = ceil(width / crop_size) * crop_size
        return width, ceil(max(int(width / ratio), 1) / crop_size) * crop_size
    height = ceil(height / crop_size) * crop_size
    return ceil(max(int(height * ratio), 1) / crop_size) * crop_size, height


def best_grid(size: Size, edge: int, most_crops: int, least_crops: int = 1) -> Grid:
    """Return the grid of `least_crops` to `most_crops` crops whose proportions are nearest to those of the image. Of two equally near ones,
    return the larger one if the image has more than half as many pixels as it."""
    width, height = size
    shapes = ((columns, rows) for columns in range(1, most_crops + 1) for rows in range(1, most_crops // columns + 1))
    best, nearest = Grid(1, 1), float("inf")
    for columns, rows in sorted((shape for shape in shapes if prod(shape) >= least_crops), key=prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and 2 * width * height > edge * edge * columns * rows):
            best, nearest = Grid(rows, columns), distance
    return best


def free_size(size: Size, edge: int, least_pixels: int, most_pixels: int, *, least_edge: int = 0) -> Size:
    """Return the multiples of `edge` that are nearest to the edges of an image, and at least `least_edge`. If the result has too many
    pixels, the image is scaled to `most_pixels` and its edges are rounded down; if too few, to `least_pixels`, and rounded up."""
    width, height = size
    if max(size) > MOST_FREE_RATIO * min(size):
        raise CuttingFault(
            f"it has {width} x {height} pixels; expected edges of which none is {MOST_FREE_RATIO} times as long as the other"
        )
    near = _nearest(size, edge, least_edge)
    if near[0] * near[1] > most_pixels:
        factor = sqrt(width * height / most_pixels)
        near = [max(edge, floor(length / factor / edge) * edge) for length in size]
    elif near[0] * near[1] < least_pixels:
        factor = sqrt(least_pixels / (width * height))
        near = [ceil(length * factor / edge) * edge for length in size]
    return near[0], near[1]


def _nearest(size: Size, edge: int, least_edge: int) -> list[int]:
    return [max(least_edge, round(length / edge) * edge) for length in size]


def filled_size(size: Size, edge: int, most_pixels: int) -> Size:
    """Scale the size of an image until it has `most_pixels`, and round both edges down to multiples of `edge`. If an edge becomes 0, return
    one line of squares, as many as the ratio of the edges, if `most_pixels` allows."""
    factor, most = sqrt(most_pixels / prod(size)), max(1, most_pixels // edge**2)
    width, height = (floor(factor * length / edge) for length in size)
    if not width:
        width, height = 1, min(size[1] // size[0], most)
    elif not height:
        width, height = min(size[0] // size[1], most), 1
    return width * edge, height * edge


def capped_size(size: Size, edge: int, longest_edge: int) -> Size:
    """Reduce the size of an image whose longer edge exceeds `longest_edge`, then round both edges up to multiples of `edge`."""
    ratio = max(size) / longest_edge
    width, height = (max(1, floor(length / ratio)) if ratio > 1 else length for length in size)
    return ((width - 1) // edge + 1) * edge, ((height - 1) // edge + 1) * edge


def middle_of(image: Image, edge: int, filter: int) -> Image:
    """Return the middle of an image after its shorter edge has become `edge`. Of a very long image, only the middle is scaled, which gives
    nearly the same bytes, because the whole could take too much memory."""
    shorter = min(image.size)
    if max(image.size) > MOST_RATIO * shorter:
        starts = [(length - shorter) / 2 for length in image.size]
        left, top = starts
        return image.resize((edge, edge), filter, box=(left, top, left + shorter, top + shorter))
    width, height = (edge if length == shorter else int(edge * length / shorter) for length in image.size)
    x, y = (width - edge) // 2, (height - edge) // 2
    return image.resize((width, height), filter).crop((x, y, x + edge, y + edge))


def crops_of(image: Image, plan: Plan) -> tuple[Grid, list[Crop]]:
    """Return the crops of an image in RGB: those of the grid, row by row, and at last that of the whole image."""

    def resized(image: Image, size: Size) -> Image:
        return _resized(image, size, plan)

    edge = plan.crop_size
    if plan.fit is Fit.CENTRE:
        return Grid(0, 0), [plan.crop(middle_of(image, edge, plan.filter))]
    if plan.fit is Fit.FREE:
        return Grid(0, 0), [plan.crop(resized(image, free_size(image.size, edge, plan.least_pixels, plan.most_pixels)))]
    if plan.fit is Fit.FILLED:
        return Grid(0, 0), [plan.crop(resized(image, filled_size(image.size, edge, plan.most_pixels)))]
    if plan.fit is Fit.MIXED:
        return _mixed(image, plan)
    if plan.fit is Fit.CAPPED:
        return Grid(0, 0), [plan.crop(resized(image, capped_size(image.size, edge, plan.longest_edge)))]
    if plan.fit is Fit.TILES:
        image = resized(image, scaled_size(image.size, plan.longest_edge))
    if not plan.splits:
        return Grid(0, 0), [plan.crop(resized(image, (edge, edge)))]
    if plan.fit is Fit.TILES:
        image = cut = resized(image, divisible_size(image.size, edge))
    else:
        grid = best_grid(image.size, edge, plan.most_crops)
        cut = resized(image, (grid.columns * edge, grid.rows * edge))
    grid, whole = Grid(cut.height // edge, cut.width // edge), plan.crop(resized(image, (edge, edge)))
    if grid == Grid(1, 1):
        return Grid(0, 0), [whole]
    return grid, [*_squares(cut, grid, edge, plan), whole]


def _mixed(image: Image, plan: Plan) -> tuple[Grid, list[Crop]]:
    """Return the tiles of an image, if it is large, and the crop of the whole image in its proportions."""
    edge = plan.crop_size
    size = free_size(image.size, edge, plan.least_pixels, plan.most_pixels, least_edge=edge)
    is_large = prod(_nearest(image.size, edge, edge)) > plan.unsplit_pixels
    grid = best_grid(image.size, plan.tile_edge, plan.most_crops, plan.least_crops) if plan.splits and is_large else Grid(1, 1)
    if grid == Grid(1, 1):
        return Grid(0, 0), [plan.crop(_resized(image, size, plan))]
    cut = _resized(image, (grid.columns * plan.tile_edge, grid.rows * plan.tile_edge), plan)
    whole = [plan.crop(_resized(image, size, plan))] if plan.shows_whole else []
    return grid, [*_squares(cut, grid, plan.tile_edge, plan), *whole]


def _resized(image: Image, size: Size, plan: Plan) -> Image:
    return image if image.size == size else image.resize(size, plan.filter)


def _squares(image: Image, grid: Grid, edge: int, plan: Plan) -> list[Crop]:
    """Cut an image into the squares of a grid, row by row."""
    places = ((column * edge, row * edge) for row in range(grid.rows) for column in range(grid.columns))
    return [plan.crop(image.crop((x, y, x + edge, y + edge))) for x, y in places]
