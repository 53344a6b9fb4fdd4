"""Encode crops of images before a step of the engine. The rows of a crop are the vectors that take the places of its image tokens; those of
the most recently used crops are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.vision import Vision
from deploy.model_loading.patches import Rows, encoded, together
from runtime.session import Session
from server.engine.step_model import SeeingLimits, Seen
from server.messages import Crop

KEPT_BYTES = 64 << 20  # of rows that are kept, so that later chunks, resumed sequences and other requests need not encode a crop again


def seeing_limits(vision: Vision, config: ModelConfig) -> SeeingLimits:
    """Return the limits of a vision model. The cost of a crop is estimated by the weights that its patches multiply."""
    edge = vision.patches_per_edge // vision.merge
    most, pixels = vision.most_squares, vision.crop_size**2 * COLOURS
    limits = SeeingLimits(pixels, edge, vision.image_token, 1, most, vision.three_axes, vision.both_ways, bool(vision.between))
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
        rows_of = (rows for crops in together(self._vision, unknown.values()) for rows in self._encoded(crops))
        found |= zip(unknown, rows_of, strict=True)
        for key, rows in found.items():
            self._kept[key] = rows
            self._kept.move_to_end(key)
        num_bytes = sum(rows.nbytes for rows in self._kept.values())
        while num_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, rows = self._kept.popitem(last=False)
            num_bytes -= rows.nbytes
        at = np.concatenate([np.arange(one.at, one.at + one.count, dtype=np.int32) for one in seen])
        return at, np.concatenate([found[one.key][one.row : one.row + one.count] for one in seen])

    def _encoded(self, crops: Sequence[Crop]) -> list[Rows]:
        return encoded(self._vision, crops, self._session.call)
