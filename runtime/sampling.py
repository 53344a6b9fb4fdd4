"""The sampler's arguments and results. The engine writes a `SampleBatch`, the compiled sampler reads it.

compiler/sampling/meaning.py says what each parameter means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NUM_TOP = 20  # maximum number of alternatives that are reported per token
WEIGHT_BITS = 40  # the most probable token has weight 2^40
SHARE_BITS = 30  # bits of top_p and typical_p, which are integers in units of 2^-30
SHARE_ONE = 1 << SHARE_BITS

NOT_A_NUMBER, NOTHING_LEFT = -1, -2  # reported in place of a token if a logit is NaN or positive infinity; if no token may be drawn


class Number(IntEnum):
    """Columns of `SampleBatch.numbers`."""

    SHARPNESS = 0  # 1 / temperature; 0: the best token is drawn
    REACH = 1  # -log(min_p): tokens whose logit is further below the largest logit, after division by the temperature, are removed
    REPETITION = 2  # penalty of the tokens in the sequence; FREQUENCY and PRESENCE are penalties of those of them that were drawn
    FREQUENCY = 3
    PRESENCE = 4


class Setting(IntEnum):
    """Columns of `SampleBatch.settings`."""

    SEED = 0  # seed of the random numbers: the bits of an i64
    POSITION = 1  # position of the token in its sequence; with CHOICE and SEED, it decides the random number
    CHOICE = 2  # number of the answer, if a request asks for several
    TOP_K = 3  # 0: all tokens
    TOP_P = 4  # top_p in units of 2^-SHARE_BITS
    TYPICAL_P = 5
    MASK = 6  # row of `masks`; -1: no mask
    TOP = 7  # number of alternatives to report besides the token; -1: report nothing
    PROCESSED = 8  # 1: report log-probabilities under the distribution that was drawn from; 0: under the one of the unprocessed logits


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """`n` rows of one step's logits, and the parameters for drawing a token from each row. The lists `bias` and `seen` have entries of all
    rows; those of row `i` have the indices `starts[i]` to `starts[i + 1] - 1`."""

    rows: NDArray[np.int32]  # [n] numbers of rows of the logits
    numbers: NDArray[np.float32]  # [n, 5]
    settings: NDArray[np.int64]  # [n, 9]
    bias_starts: NDArray[np.int32]  # [n + 1]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    seen_starts: NDArray[np.int32]  # [n + 1]
    seen_ids: NDArray[np.int32]  # distinct tokens of the sequence, to which the repetition penalty applies
    seen_counts: NDArray[np.int32]  # how often each of these tokens was drawn; 0: the token is only in the prompt
    masks: NDArray[np.int32]  # [number of masks, ceil(vocab / 32)] one bit per token, set if the token may be drawn

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order of the parameters of `sample`."""
        lists = (self.bias_starts, self.bias_ids, self.bias_values, self.seen_starts, self.seen_ids, self.seen_counts)
        return (self.rows, self.numbers, self.settings, *lists, self.masks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The numbers from which the log-probability of one token per row is computed. A total of 0 marks a row without log-probabilities."""

    distances: NDArray[np.float32]  # [n] difference between the largest logit and the token's logit, at least 0
    totals: NDArray[np.int64]  # [n] sum of the weights of all tokens; the weight of the most probable token is 2^WEIGHT_BITS
    ranks: NDArray[np.int32]  # [n] rank of the token; 1 is the most probable token
    top_ids: NDArray[np.int32]  # [n, NUM_TOP] most probable token first; -1 fills unused entries
    top_distances: NDArray[np.float32]  # [n, NUM_TOP]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens drawn for the rows of a SampleBatch."""

    tokens: NDArray[np.int32]  # [n] a token, NOT_A_NUMBER or NOTHING_LEFT
    logprobs: Logprobs

    @staticmethod
    def of(fields: tuple[Array, ...]) -> Sampled:
        """Make the result from the arrays that `sample` returns."""
        return Sampled(fields[0], Logprobs(*fields[1:]))
