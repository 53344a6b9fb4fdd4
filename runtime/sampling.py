"""The sampler's arguments and results. The engine writes a `SampleBatch`, the compiled sampler reads it.

What each parameter means is in compiler/ops/sampling/meaning.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NUM_TOP = 20  # alternatives reported at most
WEIGHT_BITS = 40  # of the best token's weight
SHARE_BITS = 30  # of top_p and typical_p: integers in units of 2^-30
SHARE_ONE = 1 << SHARE_BITS

NOT_A_NUMBER, NOTHING_LEFT = -1, -2  # instead of a token


class Number(IntEnum):
    """Columns of `SampleBatch.numbers`."""

    SHARPNESS = 0  # 1 / temperature; 0: the best token is taken
    REACH = 1  # -log(min_p): distances beyond it are cut off
    REPETITION = 2
    FREQUENCY = 3
    PRESENCE = 4


class Setting(IntEnum):
    """Columns of `SampleBatch.settings`."""

    SEED = 0  # as the bits of an i64
    POSITION = 1
    CHOICE = 2
    TOP_K = 3  # 0: all
    TOP_P = 4  # in units of 2^-SHARE_BITS
    TYPICAL_P = 5
    MASK = 6  # which row of `masks`; -1: none
    TOP = 7  # how many alternatives are reported beside the token; -1: nothing is reported
    PROCESSED = 8  # 1: report the distances that were drawn from; 0: those of the logits as they came


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """`n` rows of one step's logits and what to do with them. Entries of row `i` in a list are those from `starts[i]` to before
    `starts[i + 1]`."""

    rows: NDArray[np.int32]  # [n] of the logits
    numbers: NDArray[np.float32]  # [n, 5]
    settings: NDArray[np.int64]  # [n, 9]
    bias_starts: NDArray[np.int32]  # [n + 1]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    seen_starts: NDArray[np.int32]  # [n + 1]
    seen_ids: NDArray[np.int32]  # distinct tokens of the sequence: what repetition penalises
    seen_counts: NDArray[np.int32]  # how often each was drawn; 0: it stands in the prompt only
    masks: NDArray[np.int32]  # [any, ceil(vocab / 32)] a bit per token, set where it may be drawn

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order of the parameters of `sample`."""
        lists = (self.bias_starts, self.bias_ids, self.bias_values, self.seen_starts, self.seen_ids, self.seen_counts)
        return (self.rows, self.numbers, self.settings, *lists, self.masks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The numbers that give the log-probability of one token per row. A total of 0 marks rows that asked for none."""

    distances: NDArray[np.float32]  # [n]
    totals: NDArray[np.int64]  # [n] sum of the weights
    ranks: NDArray[np.int32]  # [n] from 1
    top_ids: NDArray[np.int32]  # [n, NUM_TOP] nearest first; -1 behind the last
    top_distances: NDArray[np.float32]  # [n, NUM_TOP]


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: NDArray[np.int32]  # [n] or NOT_A_NUMBER, NOTHING_LEFT
    logprobs: Logprobs

    @staticmethod
    def of(fields: tuple[Array, ...]) -> Sampled:
        """The log-probabilities from the results of `sample`."""
        return Sampled(fields[0], Logprobs(*fields[1:]))
