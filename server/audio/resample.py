"""Change the rate of samples with a fixed filter: a sinc under Kaiser's window, evaluated at each phase. The result has the same bits on
every machine: samples and weights are rounded so that all products and sums are exact in double precision, whatever their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

ZEROS = 16  # zero crossings of the sinc on each side
BETA = 8.0  # shape of the window: 80 dB of attenuation
PASS = 0.95  # fraction of the narrower band that passes
BLOCK = 1 << 15  # samples computed at a time
MOST_WEIGHTS = 1 << 22  # most weights of a filter; computing so many takes a second
SAMPLE_BITS, TAP_BITS = 24, 26  # bits after the binary point, of samples and weights; the absolute weights of a phase add up to less than 8

Samples = NDArray[np.float32]


def num_weights(rate: int, wanted: int) -> int:
    """Return the number of weights of the filter that changes `rate` to `wanted`."""
    return wanted // gcd(rate, wanted) * 2 * _reach(rate, wanted)


def resampled(blocks: Iterable[Samples], rate: int, wanted: int) -> Iterator[Samples]:
    """Yield the samples of all blocks, which are from -1 to 1, at the wanted rate. How the samples are divided into blocks changes no
    sample of the result."""
    if rate == wanted:
        yield from blocks
        return
    divisor = gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    reach = _reach(rate, wanted)
    taps = _taps(up, _band(rate, wanted), reach)  # [phases, 2 * reach]
    num_read = count = 0  # samples read, samples yielded
    first, held = 1 - reach, np.zeros(reach - 1)  # the index of the first sample that is still needed; the samples from that one on
    for block, size in chain(((block, len(block)) for block in blocks), [(np.zeros(reach + 1, np.float32), 0)]):  # silence comes last
        num_read += size
        held = np.concatenate([held, np.rint(block * np.float64(1 << SAMPLE_BITS))])
        # Sample `i` of the result reads samples from `i * down // up + 1 - reach` to `i * down // up + reach`.
        end = min(-(-num_read * up // down), max(count, -(-(first + len(held) - reach) * up // down)))
        for begin in range(count, end, BLOCK):
            at = np.arange(begin, min(begin + BLOCK, end), dtype=np.int64) * down
            windows = held[(at // up + 1 - reach - first)[:, None] + np.arange(2 * reach)]
            sums = np.einsum("ij,ij->i", windows, taps[at % up])
            yield np.ldexp(sums, -SAMPLE_BITS - TAP_BITS).astype(np.float32)
        count = end
        kept = count * down // up + 1 - reach
        first, held = kept, held[kept - first :]


def _band(rate: int, wanted: int) -> float:
    """Return the band that passes, as a fraction of the band of `rate`."""
    return PASS * min(1.0, wanted / rate)


def _reach(rate: int, wanted: int) -> int:
    """Return how many samples on each side the filter reads."""
    return ceil(ZEROS / _band(rate, wanted))


def _taps(up: int, band: float, reach: int) -> NDArray[np.float64]:
    """Return the weights of the filter, [phases, 2 * reach], times `1 << TAP_BITS`. Weight `j` is for the sample that comes `j - reach + 1`
    samples after the last sample at or before the position of the result."""
    distance = np.arange(2 * reach) - (reach - 1) - np.arange(up)[:, None] / up
    window = np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - (distance / reach) ** 2))) / np.i0(BETA)
    taps = band * np.sinc(band * distance) * window
    return np.rint(taps / taps.sum(axis=1, keepdims=True) * (1 << TAP_BITS))
