"""Compute the three coordinates of each token, by which some vision models rotate queries and keys (M-RoPE of Qwen2-VL).

The three coordinates of a token of text or audio are equal. The coordinates of an image token are the coordinate at which the image begins,
this coordinate plus the token's row in the image, and this coordinate plus the token's column. The text after an image goes on at the
largest coordinate plus one, so an image may span fewer coordinates than it has tokens. A token's coordinates follow from its position and
from the sizes and positions of the images up to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.engine.request import PlacedExcerpt, among, num_before
from server.messages import Clip

NUM_AXES = 3


def along_positions(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each number of `positions` on all three axes: the coordinates [tokens, 3] of text before any image."""
    return np.repeat(positions[:, None], NUM_AXES, axis=1)


def axes_of(excerpts: Sequence[PlacedExcerpt], start: int, stop: int) -> NDArray[np.int32]:
    """Return the coordinates [stop - start, 3] of tokens start .. stop - 1 of a sequence. `excerpts` are its crops of images and clips of
    audio, in order."""
    before = num_before(excerpts, start)
    found = along_positions(np.arange(start, stop, dtype=np.int32) + (excerpts[before - 1].offset if before else 0))
    for placed in among(excerpts, start, stop):
        found[max(placed.stop - start, 0) :] = np.arange(max(placed.stop, start), stop, dtype=np.int32)[:, None] + placed.offset
        if isinstance(placed.excerpt, Clip):
            continue  # the tokens of a clip have three equal coordinates, as those of text
        first, last = max(placed.start, start), min(placed.stop, stop)
        rows, columns = np.divmod(np.arange(first - placed.start, last - placed.start, dtype=np.int32), placed.excerpt.columns)
        found[first - start : last - start] = placed.origin + np.stack([np.zeros_like(rows), rows, columns], axis=1)
    return found
