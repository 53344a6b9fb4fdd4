"""Images and recordings for the goldens of models that see or hear (`make_media.py`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "media"
SIZES = ((200, 61), (37, 41), (75, 130))  # width and height of the pictures
RATE = 16_000
LENGTHS = (17_041, 75_123, 75_123, 33_333)  # samples of the recordings; models hear the beginnings


def picture(number: int) -> bytes:
    """Return an image as a file. The first is not square, the second is smaller than a crop, the third is transparent in places."""
    return (FOLDER / f"picture_{number}.png").read_bytes()


def recording(number: int, length: int) -> NDArray[np.int16]:
    """Return the beginning of a recording."""
    return _recordings()[f"recording_{number}"][:length]


@cache
def _recordings() -> dict[str, NDArray[Any]]:
    return dict(np.load(FOLDER / "recordings.npz"))
