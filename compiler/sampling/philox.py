"""Stateless random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A random number is a function of the seed, the position in the sequence and the index of the answer (`choice`), so a resumed or rescheduled
request draws the same numbers again.
"""

from __future__ import annotations

from typing import Any

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
RANDOM_BITS = 53

Words = tuple[Any, Any, Any, Any]  # integers below 2^32, or arrays of them as uint64


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Return the block of four random words for a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: int, position: int, choice: int) -> int:
    """Return an integer of RANDOM_BITS random bits."""
    words = philox4x32((position & _MASK, position >> 32, choice, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return (words[0] << 21) ^ (words[1] >> 11)
