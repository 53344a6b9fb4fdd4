"""Change the rate of samples with a fixed filter: a sinc under Kaiser's window, evaluated at each phase in double precision, so that the
result depends on nothing but the samples and the two rates."""

from __future__ import annotations

from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

ZEROS = 16  # zero crossings of the sinc on each side
BETA = 8.0  # shape of the window: 80 dB of attenuation
PASS = 0.95  # share of the smaller band that passes
BLOCK = 1 << 15  # samples computed at a time


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Return the samples [n] at the wanted rate."""
    if rate == wanted or not len(samples):
        return samples
    divisor = gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    band = PASS * min(1.0, wanted / rate)
    reach = ceil(ZEROS / band)
    taps = _taps(up, band, reach)  # [phases, 2 * reach]
    count = -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(reach - 1, np.float32), samples, np.zeros(reach + 1, np.float32)])
    out = np.empty(count, np.float32)
    for begin in range(0, count, BLOCK):
        at = np.arange(begin, min(begin + BLOCK, count), dtype=np.int64) * down
        windows = padded[(at // up)[:, None] + np.arange(2 * reach)]
        out[begin : begin + BLOCK] = np.einsum("ij,ij->i", windows, taps[at % up])
    return out


def _taps(up: int, band: float, reach: int) -> NDArray[np.float64]:
    """Return the weights of the samples around each phase: entry `j` is for the sample `j - reach + 1` after the one before the phase."""
    distance = np.arange(2 * reach) - (reach - 1) - np.arange(up)[:, None] / up
    window = np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - (distance / reach) ** 2))) / np.i0(BETA)
    taps = band * np.sinc(band * distance) * window
    return taps / taps.sum(axis=1, keepdims=True)
