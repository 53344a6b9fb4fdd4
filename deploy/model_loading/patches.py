"""Arrange crops of images as inputs of the program `see` (`compiler/frontend/seeing.py`), and the rows that it returns in the order of
their tokens.

If all crops have one size, a crop stays as it is. A crop of any size is cut into patches, which are ordered by square (the patches that
become one token); with windows, squares are ordered by window. This file only moves bytes, with one exception: by single operations on
32-bit floats, it computes the share of each entry of the table of positions in the position of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.seeing import ENTRY, most_crops
from compiler.frontend.vision import Tower, Vision
from server.messages import Crop

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Rows = Floats
CUBIC = np.float32(-0.75)  # the free coefficient of the cubic curve, as in PyTorch


def together(vision: Vision, crops: Iterable[Crop]) -> Iterator[list[Crop]]:
    """Yield the crops in lists, in order. One call of the program encodes a list, so each list gets as many crops as fit into a call."""
    at_once = most_crops(vision)
    most_tokens = vision.num_rows * (vision.most_squares if vision.any_size else at_once)
    found: list[Crop] = []
    num_tokens = 0
    for crop in crops:
        if found and (len(found) == at_once or num_tokens + crop.num_tokens > most_tokens):
            yield found
            found, num_tokens = [], 0
        found.append(crop)
        num_tokens += crop.num_tokens
    if found:
        yield found


def encoded(vision: Vision, crops: Sequence[Crop], call: Callable[..., Rows]) -> list[Rows]:
    """Return the rows of crops, each in the order of its tokens. `call(name, *inputs)` runs the program of this name."""
    return rows_by_crop(vision, crops, call(ENTRY, *inputs_of(vision, crops)))


def rows_by_crop(vision: Vision, crops: Sequence[Crop], rows: Rows) -> list[Rows]:
    """Return the rows of each crop, in the order of its tokens, if the program has returned `rows` for these crops."""
    parts = np.split(rows, np.cumsum([1 if vision.is_whole else crop.num_tokens for crop in crops])[:-1])
    if not vision.window:
        return [part.copy() for part in parts]
    return [part[np.argsort(_order(vision, crop))] for crop, part in zip(crops, parts, strict=True)]


def inputs_of(vision: Vision, crops: Sequence[Crop]) -> tuple[NDArray[Any], ...]:
    """Return the inputs of the program `see` for some crops, in the order of its parameters."""
    pixels = [np.frombuffer(crop.pixels, np.uint8) for crop in crops]
    counts = [vision.num_places * (crop.num_tokens // vision.num_rows) for crop in crops]
    crop_ids = np.repeat(np.arange(len(crops), dtype=np.int32), counts)
    ends = np.cumsum(counts, dtype=np.int32)
    if not vision.any_size:
        starts = np.concatenate([[0], ends]).astype(np.int32)
        return np.concatenate(pixels).reshape(-1, vision.crop_size, vision.crop_size * COLOURS), crop_ids, starts
    patches, points = zip(*(_patches(vision, crop, one) for crop, one in zip(crops, pixels, strict=True)), strict=True)
    windows = _windows(vision, crops) if vision.window else ()
    taps: tuple[NDArray[Any], ...] = ()
    if vision.scales_table:
        taps = (_shares(vision, crops, points),)
    elif vision.tower is Tower.QWEN3:
        taps = _taps(vision, crops, points)
    return np.concatenate(patches), np.concatenate(points), crop_ids, ends, *windows, *taps


def _patches(vision: Vision, crop: Crop, pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Ints]:
    """Return the patches of a crop of any size: their bytes, [squares, patches, values], and their rows and columns, [squares, patches,
    2]."""
    patch, merge = vision.patch_size, vision.merge
    lines = pixels.reshape(crop.rows, merge, patch, crop.columns, merge, patch * COLOURS)
    grid = np.stack(np.divmod(np.arange(crop.rows * crop.columns * merge**2, dtype=np.int32), crop.columns * merge), axis=1)
    points = grid.reshape(crop.rows, merge, crop.columns, merge, 2).transpose(0, 2, 1, 3, 4).reshape(crop.num_tokens, -1, 2)
    patches = lines.transpose(0, 3, 1, 4, 2, 5).reshape(crop.num_tokens, -1, patch**2 * COLOURS)
    if vision.window:
        order = _order(vision, crop)
        patches, points = patches[order], points[order]
    return patches, points


def _order(vision: Vision, crop: Crop) -> NDArray[np.int64]:
    """Return the squares of a crop in the order in which the program gets them: window by window."""
    return np.argsort(_window_numbers(vision, crop), kind="stable")


def _window_numbers(vision: Vision, crop: Crop) -> NDArray[np.int64]:
    """Return, for each square of a crop, the number of its window."""
    rows, columns = np.divmod(np.arange(crop.num_tokens), crop.columns)
    return rows // vision.window * crop.columns + columns // vision.window


def _windows(vision: Vision, crops: Sequence[Crop]) -> tuple[Ints, Ints]:
    """Return the number of the window of each patch, and for each window the number of patches up to its end."""
    sizes = [np.unique(_window_numbers(vision, crop), return_counts=True)[1] * vision.num_patches for crop in crops]
    counts = np.concatenate(sizes)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts), np.cumsum(counts, dtype=np.int32)


def _taps(vision: Vision, crops: Sequence[Crop], points: Sequence[Ints]) -> tuple[Ints, Floats]:
    """Return, for each patch, the four entries of the table of positions between which it lies, and the share of each: [patches, 4] both.
    `points` has the rows and columns of the patches of each crop. The table is stretched over a crop, so that their corners meet."""
    taps: list[Ints] = []
    shares: list[Floats] = []
    last = vision.table_edge - 1
    for crop, at in zip(crops, points, strict=True):
        spans = np.array([max(vision.merge * count - 1, 1) for count in (crop.rows, crop.columns)], np.float32)
        places = at.reshape(-1, 2).astype(np.float32) * np.float32(last) / spans  # [patches, 2]
        low = np.floor(places)
        near, part = low.astype(np.int32), places - low
        far = np.minimum(near + 1, last)
        rows, columns = (np.stack([near[:, axis], far[:, axis]], axis=1) for axis in range(2))
        down, across = (np.stack([1 - part[:, axis], part[:, axis]], axis=1) for axis in range(2))
        taps.append((rows[:, :, None] * vision.table_edge + columns[:, None, :]).reshape(-1, 4))
        shares.append((down[:, :, None] * across[:, None, :]).reshape(-1, 4).astype(np.float32))
    return np.concatenate(taps), np.concatenate(shares)


def _shares(vision: Vision, crops: Sequence[Crop], points: Sequence[Ints]) -> Floats:
    """Return, for each patch, the share of each entry of the table of positions, [patches, entries]. For SigLIP 2, the table is resized to
    the crop by bilinear interpolation with antialiasing. Along an axis on which the crop has fewer patches than the table has entries, a
    patch gets a weighted mean of all entries near it; along other axes, of the two nearest entries. For GLM-4.1V, the table is resized by
    bicubic interpolation: a patch gets a weighted sum of the four nearest entries along each axis."""
    found: list[Floats] = []
    entries, one = np.arange(vision.table_edge, dtype=np.float32), np.float32(1)
    for crop, at in zip(crops, points, strict=True):
        sizes = np.array([vision.merge * count for count in (crop.rows, crop.columns)], np.float32)
        scale = np.float32(vision.table_edge) / sizes
        centres = (at.reshape(-1, 2).astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)  # [patches, 2]
        if vision.tower is Tower.GLM4V:
            near = _cubic(centres.astype(np.float32), entries)
        else:
            near = np.maximum(one - np.abs(entries - centres[..., None]) / np.maximum(scale, one)[:, None], np.float32(0))
            near /= near.sum(axis=2, keepdims=True)
        found.append((near[:, 0, :, None] * near[:, 1, None, :]).reshape(len(centres), -1))
    return np.concatenate(found)


def _cubic(centres: Floats, entries: Floats) -> Floats:
    """Return, for each patch and axis of the table, the share of each entry, [patches, 2, entries], by cubic interpolation. Beyond the ends
    of the table, its outermost entries are repeated."""
    last, below = entries[-1], np.floor(centres)
    found = np.zeros((*centres.shape, len(entries)), np.float32)
    for step in range(-1, 3):
        distance = np.abs(centres - (below + np.float32(step)))
        near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
        far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
        share = np.where(distance <= 1, near, far).astype(np.float32)
        found += share[..., None] * (entries == np.clip(below + np.float32(step), np.float32(0), last)[..., None])
    return found
