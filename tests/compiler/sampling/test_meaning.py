"""Parts of the sampler's definition: the random generator Philox, random bits per seed and position, and the weights exp(-x) of tokens."""

from __future__ import annotations

import numpy as np

from compiler.sampling.meaning import weigh
from compiler.sampling.philox import philox4x32, random_bits
from runtime.sampling import WEIGHT_BITS


def test_philox_known_answers() -> None:
    """Philox gives the results that its authors publish in the Random123 distribution."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_arrays_of_counters_give_the_words_of_each() -> None:
    counters = np.array([0, 1, 2**32 - 1, 2**40 + 3], np.uint64)
    words = philox4x32((counters & 0xFFFFFFFF, counters >> 32, 0, 0), (5, 6))
    for i, counter in enumerate(counters.tolist()):
        assert tuple(int(word[i]) for word in words) == philox4x32((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (5, 6))


def test_random_bits_depend_on_seed_position_and_choice() -> None:
    values = [random_bits(seed, position, choice) for seed in range(10) for position in range(10) for choice in range(10)]
    assert len(set(values)) == 1000
    assert all(0 <= value < 2**53 for value in values)
    assert 0.45 < sum(values) / 1000 / 2**53 < 0.55
    assert random_bits(2**63 + 5, 7, 1) != random_bits(5, 7, 1)
    assert random_bits(-1, 7, 1) == random_bits(2**64 - 1, 7, 1)


def test_weights_are_exponentials() -> None:
    distances = np.linspace(0, 30, 300_001).astype(np.float32)
    exact = np.exp(-distances.astype(np.float64)) * 2**WEIGHT_BITS
    weights = weigh(distances)
    assert weights[0] == 2**WEIGHT_BITS
    assert (np.abs(weights - exact) <= 3e-6 * exact + 1).all()
    assert (weigh(np.array([28, 45, 1e9, 3e38, np.inf], np.float32)) == 0).all()
