"""Compute the sizes to which an image is scaled for each class of `runtime/fits.py`, as the image processors of transformers compute
them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil, floor, prod, sqrt

from runtime.fits import MOST_RATIO

MOST_EDGE = 4096  # maximum edge of an image, in pixels, before its edges become multiples of a crop's edge
NAFLEX_PRECISION = 1e-5  # precision of the scale of an image

Size = tuple[int, int]  # width and height


class CuttingFault(ValueError):
    """Raised for an image that cannot be brought to the size of crops. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of rows and columns of the crops that precede the crop of the whole image; both are 0 if there are none."""

    rows: int
    columns: int


def scaled_size(size: Size, longest_edge: int) -> Size:
    """Return the size of an image whose longer edge is scaled to `longest_edge`. The shorter edge is rounded down, then up to an even
    number. If the longer edge then exceeds MOST_EDGE, the size is reduced in proportion. No edge becomes less than 1."""
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


def best_grid(size: Size, edge: int, most_crops: int, least_crops: int = 1) -> Shape:
    """Return the grid of `least_crops` to `most_crops` crops whose proportions are nearest to those of the image, or 1 x 1 if there is no
    such grid. Of two equally near grids, return the larger one if the image has more than half as many pixels as that grid."""
    width, height = size
    shapes = ((columns, rows) for columns in range(1, most_crops + 1) for rows in range(1, most_crops // columns + 1))
    best, nearest = Shape(1, 1), float("inf")
    for columns, rows in sorted((shape for shape in shapes if prod(shape) >= least_crops), key=prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and 2 * width * height > edge * edge * columns * rows):
            best, nearest = Shape(rows, columns), distance
    return best


def free_size(size: Size, edge: int, least_pixels: int, most_pixels: int, *, least_edge: int = 0, enlarges_edges: bool = False) -> Size:
    """Return the multiples of `edge` that are nearest to the edges of an image, and at least `least_edge`. If the result has too many
    pixels, the image is scaled to `most_pixels` instead, and its edges are rounded down. If it has too few, the image is scaled to
    `least_pixels`, and its edges are rounded up. With `enlarges_edges`, an image that is narrower than `edge` is first enlarged. Raise
    CuttingFault if one edge is more than MOST_RATIO times as long as the other."""
    width, height = size
    if max(size) > MOST_RATIO * min(size):
        raise CuttingFault(f"it has {width} x {height} pixels; expected edges of which none is {MOST_RATIO} times as long as the other")
    if enlarges_edges and min(size) < edge:
        factor = edge / min(size)
        width, height = size = int(width * factor), int(height * factor)
    near = nearest_size(size, edge, least_edge)
    if near[0] * near[1] > most_pixels:
        factor = sqrt(width * height / most_pixels)
        near = [max(edge, floor(length / factor / edge) * edge) for length in size]
    elif near[0] * near[1] < least_pixels:
        factor = sqrt(least_pixels / (width * height))
        near = [ceil(length * factor / edge) * edge for length in size]
    return near[0], near[1]


def nearest_size(size: Size, edge: int, least_edge: int) -> list[int]:
    """Return the multiples of `edge` that are nearest to the edges of an image, and at least `least_edge`."""
    return [max(least_edge, round(length / edge) * edge) for length in size]


def filled_size(size: Size, edge: int, most_pixels: int) -> Size:
    """Scale the size of an image until it has `most_pixels`, and round both edges down to multiples of `edge`. If an edge becomes 0, return
    one line of as many squares as the ratio of the edges, or as `most_pixels` allows if that is less."""
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


def naflex_size(size: Size, edge: int, most_squares: int) -> Size:
    """Return the largest size in about the proportions of an image that has at most `most_squares` squares when both edges are rounded up
    to multiples of `edge`. The scale is found in as many steps as transformers takes."""

    def scaled(scale: float) -> Size:
        """Return the size times `scale`, with both edges rounded up to multiples of `edge`."""
        width, height = (max(edge, ceil(length * scale / edge) * edge) for length in size)
        return width, height

    low, high = NAFLEX_PRECISION / 10, 100.0
    while high - low >= NAFLEX_PRECISION:
        scale = (low + high) / 2
        if prod(scaled(scale)) <= most_squares * edge**2:
            low = scale
        else:
            high = scale
    return scaled(low)


def best_canvas(size: Size, edge: int, most_crops: int, *, enlarges: bool = False) -> Shape:
    """Return the rows and columns of crops of the best canvas for an image. If some canvases are large enough for the whole image, the best
    one is that on which the image is enlarged least (if `enlarges`: most). Otherwise it is that on which the image is reduced least. Of
    equally good canvases, return the smallest."""
    width, height = size
    shapes = [Shape(rows, number // rows) for number in range(most_crops, 0, -1) for rows in range(1, number + 1) if not number % rows]
    scales = [_single(min(shape.rows * edge / height, shape.columns * edge / width)) for shape in shapes]
    larger = [scale for scale in scales if scale >= 1]
    best = (max if enlarges else min)(larger) if larger else max(scales)
    return min((shape for shape, scale in zip(shapes, scales, strict=True) if scale == best), key=lambda shape: shape.rows * shape.columns)


def _single(number: float) -> float:
    """Round a number to a 32-bit float. transformers compares scales as such floats, and more scales are then equal."""
    return struct.unpack("f", struct.pack("f", number))[0]


def size_within(size: Size, most: Size) -> Size:
    """Return the largest size in the proportions of an image that is not larger than `most`. As in transformers, a scale that reduces the
    image is rounded to a 32-bit float."""
    across, down = (_single(room / length) if room < length else room / length for room, length in zip(most, size, strict=True))
    is_wide = _single(across) < _single(down) if min(across, down) < 1 else across < down
    if is_wide:
        return most[0], max(1, min(_scaled(size[1], across), most[1]))
    return max(1, min(_scaled(size[0], down), most[0])), most[1]


def _scaled(length: int, factor: float) -> int:
    """Return a length times a factor, rounded down. If the factor is below 1, the product is first rounded to a 32-bit float, as in
    transformers."""
    return floor(_single(length * factor) if factor < 1 else length * factor)
