"""Cut an image into the crops that a model sees, as the image processors of transformers do.

For Idefics3, the image is scaled so that its longer edge has a given number of pixels, then so that both edges are multiples of a crop's
edge. For InternVL, it is scaled to the grid of crops that fits its proportions best. For Llama 4, it is put on a black canvas of whole
crops. In these three cases, the result is cut into crops, and a last crop shows the whole image; with detail `low`, or if the result is as
small as a crop, there is only one crop. For Qwen2-VL, Pixtral and Gemma 4, the image is one crop, whose edges are multiples of the edge of
the square that an image token stands for. LFM2-VL sees such a crop; if the image is large, square tiles of it precede this crop, and are
crops, too. Other models see one crop of a fixed size: the whole image, or its middle. Pillow scales bytes with weights that are rounded to
integers, so the pixels are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, assert_never

from runtime.fits import Canvas, Capped, Centre, Filled, Fit, Free, Grid, Mixed, Naflex, Stretched, Tiles
from server.images.sizes import (
    Shape,
    Size,
    best_canvas,
    best_grid,
    capped_size,
    divisible_size,
    filled_size,
    free_size,
    naflex_size,
    nearest_size,
    scaled_size,
    size_within,
)
from server.messages import Crop

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_CENTRE_RATIO = 64  # maximum ratio of the edges of an image that is scaled as a whole before its middle is cut out


@dataclass(frozen=True, slots=True)
class Plan:
    """How images are cut."""

    crop_size: int  # edge of a crop in pixels; if crops may have any size, edge of the squares that a crop consists of
    edge_tokens: int  # number of rows, and of columns, of image tokens for a square of crop_size pixels
    fit: Fit
    filter: int  # Pillow's number of the filter that scales images

    def crop(self, image: Image) -> Crop:
        """Return the crop that consists of all pixels of this image."""
        return Crop.of(image.tobytes(), *(edge // self.crop_size * self.edge_tokens for edge in (image.height, image.width)))


def crops_of(image: Image, plan: Plan) -> tuple[Shape, list[Crop]]:
    """Return the shape of the grid of an image in RGB, and its crops: those of the grid, row by row, and last the crop of the whole image,
    if the model sees one. Raise CuttingFault if the ratio of the edges is too large for the model."""
    edge, size = plan.crop_size, image.size
    match plan.fit:
        case Centre():
            return _alone(middle_of(image, edge, plan.filter), plan)
        case Stretched():
            return _alone(_resized(image, (edge, edge), plan), plan)
        case Tiles() as fit:
            image = _resized(image, scaled_size(size, fit.longest_edge), plan)
            cut = _resized(image, divisible_size(image.size, edge), plan) if fit.splits else image
            whole = _resized(cut, (edge, edge), plan)
            return _with_whole(cut, whole, plan) if fit.splits else _alone(whole, plan)
        case Grid() as fit:
            whole, shape = _resized(image, (edge, edge), plan), best_grid(size, edge, fit.most_crops)
            if not fit.splits:
                return _alone(whole, plan)
            return _with_whole(_resized(image, (shape.columns * edge, shape.rows * edge), plan), whole, plan)
        case Canvas() as fit:
            return _on_canvas(image, fit, plan)
        case Mixed() as fit:
            return _mixed(image, fit, plan)
        case Free() as fit:
            size = free_size(size, edge, fit.least_pixels, fit.most_pixels, enlarges_edges=fit.enlarges_edges)
            return _alone(_resized(image, size, plan), plan)
        case Filled() as fit:
            return _alone(_resized(image, filled_size(size, edge, fit.most_pixels), plan), plan)
        case Naflex() as fit:
            return _alone(_resized(image, naflex_size(size, edge, fit.squares), plan), plan)
        case Capped() as fit:
            return _alone(_resized(image, capped_size(size, edge, fit.longest_edge), plan), plan)
        case _:
            assert_never(plan.fit)


def _alone(image: Image, plan: Plan) -> tuple[Shape, list[Crop]]:
    """Return an image as its only crop, without a grid."""
    return Shape(0, 0), [plan.crop(image)]


def _with_whole(cut: Image, whole: Image, plan: Plan) -> tuple[Shape, list[Crop]]:
    """Return the shape of the grid of crops that `cut` divides into, and these crops, followed by the crop of `whole`. If the grid has one
    crop, return only the crop of `whole`."""
    edge = plan.crop_size
    shape = Shape(cut.height // edge, cut.width // edge)
    if shape == Shape(1, 1):
        return _alone(whole, plan)
    return shape, [*_squares(cut, shape, edge, plan), plan.crop(whole)]


def _on_canvas(image: Image, fit: Canvas, plan: Plan) -> tuple[Shape, list[Crop]]:
    """Return the shape and the crops of the canvas on which an image fits best, and the crop of the whole image, stretched to a square. For
    a canvas of one crop, return only that crop."""
    edge = plan.crop_size
    shape = best_canvas(image.size, edge, fit.most_crops, enlarges=fit.enlarges) if fit.splits else Shape(1, 1)
    canvas = shape.columns * edge, shape.rows * edge
    most = canvas if fit.enlarges else tuple(min(max(length, edge), room) for length, room in zip(image.size, canvas, strict=True))
    inner = _resized(image, size_within(image.size, (most[0], most[1])), plan)
    cut = inner.crop((0, 0, *canvas))  # what is beyond the image is black
    if shape == Shape(1, 1):
        return _alone(cut, plan)
    return _with_whole(cut, _resized(image, (edge, edge), plan), plan)


def _mixed(image: Image, fit: Mixed, plan: Plan) -> tuple[Shape, list[Crop]]:
    """Return the shape of the grid of a large image, its tiles, and the crop of the whole image in its proportions, if the model sees one.
    For an image that is not divided into tiles, return only the crop of the whole image."""
    edge = plan.crop_size
    size = free_size(image.size, edge, fit.least_pixels, fit.most_pixels, least_edge=edge)
    is_large = prod(nearest_size(image.size, edge, edge)) > fit.unsplit_pixels
    shape = best_grid(image.size, fit.tile_edge, fit.most_crops, fit.least_crops) if fit.splits and is_large else Shape(1, 1)
    if shape == Shape(1, 1):
        return _alone(_resized(image, size, plan), plan)
    cut = _resized(image, (shape.columns * fit.tile_edge, shape.rows * fit.tile_edge), plan)
    whole = [plan.crop(_resized(image, size, plan))] if fit.shows_whole else []
    return shape, [*_squares(cut, shape, fit.tile_edge, plan), *whole]


def _resized(image: Image, size: Size, plan: Plan) -> Image:
    """Return an image scaled to a size."""
    return image if image.size == size else image.resize(size, plan.filter)


def _squares(image: Image, shape: Shape, edge: int, plan: Plan) -> list[Crop]:
    """Cut an image into the squares of a grid, row by row. `edge`: pixels of an edge of a square."""
    places = ((column * edge, row * edge) for row in range(shape.rows) for column in range(shape.columns))
    return [plan.crop(image.crop((x, y, x + edge, y + edge))) for x, y in places]


def middle_of(image: Image, edge: int, filter: int) -> Image:
    """Return the square in the middle of an image, scaled so that its edges are `edge`. Usually the whole image is scaled first, and then
    the square is cut out. Of a very long image, only the square is scaled, because the whole could take too much memory; this gives nearly
    the same bytes."""
    shorter = min(image.size)
    if max(image.size) > MOST_CENTRE_RATIO * shorter:
        starts = [(length - shorter) / 2 for length in image.size]
        left, top = starts
        return image.resize((edge, edge), filter, box=(left, top, left + shorter, top + shorter))
    width, height = (edge if length == shorter else int(edge * length / shorter) for length in image.size)
    x, y = (width - edge) // 2, (height - edge) // 2
    return image.resize((width, height), filter).crop((x, y, x + edge, y + edge))
