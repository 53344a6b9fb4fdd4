"""Encode crops of images before a step, and keep the rows of those that were encoded last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.seeing import ENTRY, most_crops
from compiler.frontend.vision import Vision
from runtime.session import Session
from server.engine.step_model import SeeingLimits, Seen
from server.messages import Crop

KEPT_BYTES = 64 << 20  # rows of crops that are kept, so that chunks, preempted sequences and other requests need no second look

Rows = NDArray[np.float32]


def seeing_limits(vision: Vision, config: ModelConfig) -> SeeingLimits:
    """Return the limits of a model that sees. The cost of a crop is estimated by the weights that its patches multiply."""
    edge = vision.patches_per_edge // vision.merge
    most, pixels = vision.most_squares, vision.crop_size**2 * COLOURS
    limits = SeeingLimits(pixels, edge, vision.image_token, 1, most, vision.three_axes, vision.both_ways)
    own = vision.num_layers * vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    decoder = config.num_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    num_squares = limits.example.num_tokens // edge**2
    return replace(limits, cost=-(-num_squares * vision.num_places * own // decoder))


class Seer:
    """Runs the program `see`. The rows of a crop are the same bits whenever they are computed, so it does not matter which are kept."""

    def __init__(self, session: Session, vision: Vision, row_size: int) -> None:
        self._session = session
        self._vision = vision
        self._row_size = row_size
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # least recently used first

    def look(self, seen: Sequence[Seen]) -> tuple[NDArray[Any], ...]:
        """Return the indices of a step's image tokens, and the rows that they read. If tokens of a crop attend to later ones, also return
        the position of the last token of the crop of each token."""
        lasts = np.repeat(np.array([one.last for one in seen], np.int32), [one.count for one in seen]) if self._vision.both_ways else None
        found = self._looked(seen) if seen else (np.empty(0, np.int32), np.empty((0, self._row_size), np.float32))
        return found if lasts is None else (*found, lasts)

    def _looked(self, seen: Sequence[Seen]) -> tuple[NDArray[np.int32], Rows]:
        found = {one.key: rows for one in seen if (rows := self._kept.get(one.key)) is not None}
        unknown = {one.key: one.crop for one in seen if one.key not in found}
        for keys in self._calls(unknown):
            found |= zip(keys, self._encoded([unknown[key] for key in keys]), strict=True)
        for key, rows in found.items():
            self._kept[key] = rows
            self._kept.move_to_end(key)
        num_bytes = sum(rows.nbytes for rows in self._kept.values())
        while num_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, rows = self._kept.popitem(last=False)
            num_bytes -= rows.nbytes
        at = np.concatenate([np.arange(one.at, one.at + one.count, dtype=np.int32) for one in seen])
        return at, np.concatenate([found[one.key][one.row : one.row + one.count] for one in seen])

    def _calls(self, crops: Mapping[bytes, Crop]) -> Iterator[list[bytes]]:
        """Yield the keys of crops that are encoded together."""
        keys: list[bytes] = []
        num_tokens = 0
        at_once = most_crops(self._vision)
        most_tokens = self._vision.num_rows * (self._vision.most_squares if self._vision.any_size else at_once)
        for key, crop in crops.items():
            if keys and (len(keys) == at_once or num_tokens + crop.num_tokens > most_tokens):
                yield keys
                keys, num_tokens = [], 0
            keys.append(key)
            num_tokens += crop.num_tokens
        if keys:
            yield keys

    def _encoded(self, crops: Sequence[Crop]) -> list[Rows]:
        return encoded(self._vision, crops, self._session.call)


def encoded(vision: Vision, crops: Sequence[Crop], call: Callable[..., Rows]) -> list[Rows]:
    """Return the rows of crops in the order of their tokens. `call` runs the program with this name."""
    rows = call(ENTRY, *_inputs(vision, crops))
    parts = np.split(rows, np.cumsum([crop.num_tokens for crop in crops])[:-1])
    if not vision.window:
        return [part.copy() for part in parts]
    return [part[np.argsort(_order(vision, crop))] for crop, part in zip(crops, parts, strict=True)]


def _inputs(vision: Vision, crops: Sequence[Crop]) -> tuple[NDArray[Any], ...]:
    """Return the inputs of the program `see` for some crops."""
    pixels = [np.frombuffer(crop.pixels, np.uint8) for crop in crops]
    counts = [vision.num_places * (crop.num_tokens // vision.num_rows) for crop in crops]
    crop_ids = np.repeat(np.arange(len(crops), dtype=np.int32), counts)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    if not vision.any_size:
        return np.concatenate(pixels).reshape(-1, vision.crop_size, vision.crop_size * COLOURS), crop_ids, starts
    patches, points = zip(*(_patches(vision, crop, one) for crop, one in zip(crops, pixels, strict=True)), strict=True)
    inputs = np.concatenate(patches), np.concatenate(points), crop_ids, starts
    windows = _windows(vision, crops) if vision.window else ()
    taps = _taps(vision, [(crop, part) for crop, part in zip(crops, points, strict=True)]) if vision.table_edge else ()
    return *inputs, *windows, *taps


def _patches(vision: Vision, crop: Crop, pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the patches of a crop of any size, those of each square one after the other: their bytes, and their rows and columns."""
    patch, merge = vision.patch_size, vision.merge
    lines = pixels.reshape(crop.rows, merge, patch, crop.columns, merge, patch * COLOURS)
    grid = np.stack(np.divmod(np.arange(crop.rows * crop.columns * merge**2, dtype=np.int32), crop.columns * merge), axis=1)
    points = grid.reshape(crop.rows, merge, crop.columns, merge, 2).transpose(0, 2, 1, 3, 4).reshape(crop.num_tokens, -1)
    patches = lines.transpose(0, 3, 1, 4, 2, 5).reshape(crop.num_tokens, -1)
    if vision.window:
        order = _order(vision, crop)
        patches, points = patches[order], points[order]
    return patches.reshape(-1, patch**2 * COLOURS), points.reshape(-1, 2)


def _order(vision: Vision, crop: Crop) -> NDArray[np.int64]:
    """Return the squares of a crop in the order in which the program gets them: window by window."""
    return np.argsort(_window_numbers(vision, crop), kind="stable")


def _window_numbers(vision: Vision, crop: Crop) -> NDArray[np.int64]:
    """Return the number of the window of each square of a crop."""
    rows, columns = np.divmod(np.arange(crop.num_tokens), crop.columns)
    return rows // vision.window * crop.columns + columns // vision.window


def _windows(vision: Vision, crops: Sequence[Crop]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the number of the window of each patch, and where windows start."""
    sizes = [np.unique(_window_numbers(vision, crop), return_counts=True)[1] * vision.num_patches for crop in crops]
    counts = np.concatenate(sizes)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts), starts


def _taps(vision: Vision, points: Sequence[tuple[Crop, NDArray[np.int32]]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return, for each patch of some crops, the four entries of the table of positions between which it lies, and the share of each. The
    table is stretched over the crop, so that their corners meet."""
    taps: list[NDArray[np.int32]] = []
    shares: list[NDArray[np.float32]] = []
    last = vision.table_edge - 1
    for crop, at in points:
        extents = np.array([crop.rows, crop.columns], np.float32) * np.float32(vision.merge)
        places = at.astype(np.float32) * np.float32(last) / np.maximum(extents - 1, np.float32(1))  # [patches, 2]
        low = np.floor(places)
        part = places - low
        near = low.astype(np.int32)
        far = np.minimum(near + 1, last)
        rows, columns = (np.stack([near[:, axis], far[:, axis]], axis=1) for axis in range(2))
        down, across = (np.stack([1 - part[:, axis], part[:, axis]], axis=1) for axis in range(2))
        taps.append((rows[:, :, None] * vision.table_edge + columns[:, None, :]).reshape(-1, 4))
        shares.append((down[:, :, None] * across[:, None, :]).reshape(-1, 4))
    return np.concatenate(taps), np.concatenate(shares)
