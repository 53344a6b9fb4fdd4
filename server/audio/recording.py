"""A decoded recording, from which speech models hear one piece at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.spectrogram import AROUND, BEFORE, HOP, RATE
from server.messages import Audio


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Recording:
    """A recording to transcribe."""

    samples: NDArray[np.float32]  # as `with_surroundings` returns them
    loudest: float  # the largest energy of a hop, as `loudest_energy` returns it

    @property
    def num_bytes(self) -> int:
        """The bytes of the samples."""
        return self.samples.nbytes

    @property
    def num_samples(self) -> int:
        """The number of samples of the recording, without those around it."""
        return len(self.samples) - AROUND - BEFORE

    @property
    def num_hops(self) -> int:
        """The number of whole hops."""
        return self.num_samples // HOP

    @property
    def duration_s(self) -> float:
        return self.num_samples / RATE

    def piece(self, begin: int, size: int) -> Audio:
        """Return `size` hops from hop `begin`, or fewer if the recording ends before. A piece has at least one hop, even if the recording
        has none."""
        samples = self.samples[begin * HOP : (begin + max(size, 1)) * HOP + AROUND]
        return Audio(samples.astype("<f4").tobytes(), self.loudest)


def with_surroundings(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Put samples before and after a recording, as Whisper does: its reflection before it, silence after it."""
    if not len(samples):
        return np.zeros(BEFORE + AROUND, np.float32)
    return np.concatenate([np.pad(samples[: BEFORE + 1], (BEFORE, 0), "reflect"), samples[BEFORE + 1 :], np.zeros(AROUND, np.float32)])
