"""The tables that compute the spectrogram of audio for speech models: a short-time Fourier transform and mel filters. The compiled program
`hear` and `server/audio/loudest.py` use these tables.

A hop is 10 ms. Hop `t` of a recording is computed from WINDOW samples around sample `t * HOP`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RATE = 16_000  # samples per second
WINDOW, HOP = 400, 160  # samples of the window of a Fourier transform; samples from the beginning of a window to that of the next one
BEFORE = WINDOW // 2  # samples that the first hop of a piece of audio reads before the piece
ROWS = -(-WINDOW // HOP)  # number of hops that a window overlaps
AROUND = (ROWS - 1) * HOP  # samples that a piece of audio needs besides HOP per hop: BEFORE of them precede the piece, the others follow it
BINS = WINDOW // 2 + 1  # number of frequencies of a transform
LEAST, RANGE = 1e-10, 8.0  # lower bound of energies; largest difference between the largest logarithm (base 10) of an energy and any other


def fourier_table() -> NDArray[np.float64]:
    """Return the Fourier transform of a window weighted by Hann's function, [2 * BINS, WINDOW]: real parts, then imaginary parts."""
    n, k = np.arange(WINDOW), np.arange(BINS)[:, None]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * n / WINDOW)
    turns = 2 * np.pi * (k * n % WINDOW) / WINDOW
    return np.concatenate([hann * np.cos(turns), hann * np.sin(turns)])


def mel_filters(num_mels: int) -> NDArray[np.float64]:
    """Return triangular filters [mels, bins] of equal area on Slaney's mel scale: linear up to 1 kHz, then logarithmic."""
    steps = _hertz(np.linspace(_mel(0.0), _mel(RATE / 2), num_mels + 2))
    bins = np.arange(BINS) * RATE / WINDOW
    rising = (bins - steps[:-2, None]) / np.diff(steps)[:-1, None]
    falling = (steps[2:, None] - bins) / np.diff(steps)[1:, None]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (steps[2:] - steps[:-2]))[:, None]


MEL_HZ, BREAK_HZ, LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / MEL_HZ if hertz < BREAK_HZ else BREAK_HZ / MEL_HZ + float(np.log(hertz / BREAK_HZ)) / LOG_STEP


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    first = BREAK_HZ / MEL_HZ
    return np.where(mels < first, mels * MEL_HZ, BREAK_HZ * np.exp(LOG_STEP * (np.maximum(mels, first) - first)))
