"""The crops of images that the goldens of vision models have (`vision.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.messages import Crop
from tests.golden.vision_subject import Subject


def crops_of(subject: Subject, numbers: Iterable[int]) -> list[Crop]:
    """Return the crops of images, in order."""
    return [crop_of(subject, pixels) for number in numbers for pixels in pixels_of(subject, number)]


def pixels_of(subject: Subject, number: int) -> list[NDArray[Any]]:
    """Return the pixels of the crops of an image. The last crop may show the whole image, and have another size than those before it."""
    found = [*subject.arrays[f"crops_{number}"]]
    return [*found, subject.arrays[f"whole_{number}"]] if f"whole_{number}" in subject.arrays else found


def crop_of(subject: Subject, pixels: NDArray[Any]) -> Crop:
    """Return a Crop with these pixels [height, width, 3]."""
    height, width, _ = pixels.shape
    edge = isqrt(subject.rows)
    return Crop.of(pixels.astype(np.uint8).tobytes(), height // subject.crop * edge, width // subject.crop * edge)


def tokens_of(subject: Subject, crop: Crop) -> list[int]:
    """Return the tokens of a crop in a prompt."""
    row = [subject.image] * crop.columns
    between = [subject.tokens.index(subject.between)] if subject.between else []
    return [*row, *((between + row) * (crop.rows - 1))]
