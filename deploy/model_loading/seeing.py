"""Encode crops of images before a step, and keep the rows of those that were encoded last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.seeing import COLOURS, ENTRY, most_crops
from compiler.frontend.vision import Vision
from runtime.session import Session
from server.engine.step_model import SeeingLimits, Seen

KEPT_BYTES = 64 << 20  # rows of crops that are kept, so that chunks, preempted sequences and other requests need no second look

Rows = NDArray[np.float32]


def seeing_limits(vision: Vision, config: ModelConfig) -> SeeingLimits:
    """Return the limits of a model that sees. The cost of a crop is estimated by the weights that its patches multiply."""
    own = vision.num_layers * vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    decoder = config.num_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    cost = -(-vision.num_places * own // decoder)
    return SeeingLimits(vision.crop_size**2 * COLOURS, vision.num_rows, vision.image_token, cost, vision.both_ways)


class Seer:
    """Runs the program `see`. The rows of a crop are the same bits whenever they are computed, so it does not matter which are kept."""

    def __init__(self, session: Session, vision: Vision, row_size: int) -> None:
        self._session = session
        self._vision = vision
        self._row_size = row_size
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # least recently used first
        self._most_kept = max(1, KEPT_BYTES // (4 * row_size * vision.num_rows))

    def look(self, seen: Sequence[Seen]) -> tuple[NDArray[Any], ...]:
        """Return the indices of a step's image tokens, and the rows that they read. If tokens of a crop attend to later ones, also return
        the position of the last token of the crop of each token."""
        lasts = np.repeat(np.array([one.last for one in seen], np.int32), [one.count for one in seen]) if self._vision.both_ways else None
        found = self._looked(seen) if seen else (np.empty(0, np.int32), np.empty((0, self._row_size), np.float32))
        return found if lasts is None else (*found, lasts)

    def _looked(self, seen: Sequence[Seen]) -> tuple[NDArray[np.int32], Rows]:
        found = {one.key: rows for one in seen if (rows := self._kept.get(one.key)) is not None}
        unknown = list({one.key: one.pixels for one in seen if one.key not in found}.items())
        at_once = most_crops(self._vision)
        for first in range(0, len(unknown), at_once):
            some = unknown[first : first + at_once]
            found |= zip([key for key, _ in some], self._encoded([pixels for _, pixels in some]), strict=True)
        for key, rows in found.items():
            self._kept[key] = rows
            self._kept.move_to_end(key)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        at = np.concatenate([np.arange(one.at, one.at + one.count, dtype=np.int32) for one in seen])
        return at, np.concatenate([found[one.key][one.row : one.row + one.count] for one in seen])

    def _encoded(self, crops: Sequence[bytes]) -> list[Rows]:
        count, vision = len(crops), self._vision
        pixels = np.frombuffer(b"".join(crops), np.uint8).reshape(count, vision.crop_size, vision.crop_size * COLOURS)
        crop_ids = np.repeat(np.arange(count, dtype=np.int32), vision.num_places)
        starts = np.arange(count + 1, dtype=np.int32) * vision.num_places
        rows = self._session.call(ENTRY, pixels, crop_ids, starts)
        return [part.copy() for part in np.split(rows, count)]
