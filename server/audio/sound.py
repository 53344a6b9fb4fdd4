"""Describe a file of audio that is open: what it declares, and its samples, which are decoded when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class AudioError(ValueError):
    """Raised for audio that cannot be decoded. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Sound:
    """An open file of audio."""

    rate: int  # samples per second of each channel
    channels: int
    seconds: float | None  # None: the file does not declare its length
    blocks: Iterator[NDArray[np.float32]]  # decodes the samples: the mean of all channels, from -1 to 1


def mono(samples: NDArray[np.floating], axis: int) -> NDArray[np.float32]:
    """Return the mean of the channels, which are on the given axis."""
    return samples.mean(axis=axis, dtype=np.float64).astype(np.float32)


def floats(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the floats of a file, clipped to -1 to 1, with 0 in place of NaN."""
    return np.clip(np.nan_to_num(values, nan=0.0), -1.0, 1.0).astype(np.float32)
