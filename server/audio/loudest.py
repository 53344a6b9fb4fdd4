"""Compute the largest energy in the mel spectrogram of a recording, with the same bits on every machine.

The table of the Fourier transform, and the samples, are rounded to integers so that all products and sums of the transform are exact in
double precision, whatever their order. The energy of each mel band is then summed over its bins in a fixed order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from runtime.spectrogram import BINS, HOP, WINDOW, fourier_table, mel_filters

TABLE_BITS, SAMPLE_BITS = 20, 23  # bits of the integers; a sum of products is at most WINDOW / 2 * 2 ** 43, less than 2 ** 53
BLOCK = 3000  # hops computed at a time


def loudest_energy(samples: NDArray[np.float32], num_mels: int) -> float:
    """Return the largest mel energy of all hops of the samples. The samples include those outside the recording that its first and last
    hops read."""
    top = float(np.abs(samples).max())
    if top == 0:
        return 0.0
    shift = SAMPLE_BITS - math.frexp(top)[1]
    table = np.rint(fourier_table() * 2**TABLE_BITS)
    filters = mel_filters(num_mels).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    found = 0.0
    for begin in range(0, len(windows), BLOCK):
        rounded = np.rint(np.ldexp(windows[begin : begin + BLOCK].T.astype(np.float64), shift))
        parts = table @ rounded  # [2 * BINS, hops]
        power = parts[:BINS] * parts[:BINS] + parts[BINS:] * parts[BINS:]
        for weights in filters:
            energies = np.zeros(power.shape[1])
            for index in np.flatnonzero(weights):
                energies += weights[index].astype(np.float64) * power[index]
            found = max(found, float(energies.max()))
    return math.ldexp(found, -2 * (TABLE_BITS + shift))
