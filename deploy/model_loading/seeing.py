"""Encode crops of images for the steps of a vision model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.seeing import ENTRY
from compiler.frontend.vision import Vision
from deploy.model_loading.excerpts import ExcerptEncoder, Rows
from deploy.model_loading.patches import inputs_of, rows_by_crop, together
from runtime.parts import InParts
from runtime.session import Session
from server.engine.step_model import ExcerptTokens, SeeingLimits
from server.messages import Crop


def seeing_limits(vision: Vision, config: ModelConfig) -> SeeingLimits:
    """Return the limits of a vision model. The cost of a crop, in tokens of a prompt, is estimated by the weights that its patches
    multiply."""
    edge = vision.patches_per_edge // vision.merge
    most, pixels = vision.most_squares, vision.crop_size**2 * COLOURS
    limits = SeeingLimits(pixels, edge, vision.image_token, 1, most, vision.three_axes, vision.both_ways, bool(vision.between))
    own = vision.num_layers * vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    decoder = config.num_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    num_squares = limits.example.num_tokens // edge**2
    return replace(limits, cost=-(-num_squares * vision.num_places * own // decoder))


class Seer(ExcerptEncoder):
    """Runs the program `see`."""

    def __init__(self, session: Session, vision: Vision, row_size: int) -> None:
        super().__init__(row_size)
        self._session = session
        self._vision = vision

    def look(self, seen: Sequence[ExcerptTokens]) -> tuple[NDArray[Any], ...]:
        """Return what `ExcerptEncoder.look` returns, and, if tokens of a crop attend to later tokens of the crop, for each of these tokens
        the position of its crop's last token."""
        found = super().look(seen)
        if not self._vision.both_ways:
            return found
        return *found, np.repeat(np.array([one.last for one in seen], np.int32), [one.count for one in seen])

    def together(self, excerpts: Sequence[Crop]) -> Iterator[Sequence[Crop]]:
        return together(self._vision, excerpts)

    def rows_of(self, excerpts: Sequence[Crop]) -> InParts[list[Rows]]:
        return encoded_in_parts(self._session, self._vision, excerpts)


def encoded_in_parts(session: Session, vision: Vision, crops: Iterable[Crop]) -> InParts[list[Rows]]:
    """Run the program `see` for some crops, in parts: yield between two parts, and return the rows of each crop."""
    found: list[Rows] = []
    for some in together(vision, crops):
        rows = yield from session.in_parts(ENTRY, *inputs_of(vision, some))
        found += rows_by_crop(vision, some, rows)
    return found
