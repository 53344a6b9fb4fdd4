"""The reference sampler: it defines every sampling parameter in NumPy, one row of logits at a time.

The compiled sampler gives the same result to the last bit, whatever other rows are in the batch. The order of the steps is part of the
definition:

    bias -> repetition, frequency and presence penalties -> mask -> temperature -> top_k -> top_p -> min_p -> typical_p -> draw

After the temperature step, a row holds *distances*: by how many nats each token is less likely than the best token. Of two tokens at equal
distances, the token with the lower id ranks as nearer. A token that was removed is infinitely far. Each truncation works on the tokens that
the previous truncation kept.

Integers called *weights* represent probabilities: a token at distance 0 has the weight 2^40. Sums of weights are exact, so the token that a
random number selects depends neither on how a row is divided into blocks, nor on threads, nor on the instruction set. `weigh` uses f32
products and sums without fusing, which every machine rounds alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.sampling.philox import RANDOM_BITS, random_bits
from runtime.sampling import NOT_A_NUMBER, NOTHING_LEFT, NUM_TOP, SHARE_BITS, SHARE_ONE, WEIGHT_BITS, Number, Setting

Array = NDArray[Any]
Row = NDArray[np.float32]

LOG2_E = 1.4426950216293335  # rounded to f32
# POWER has the coefficients of r, r^2, r^3, ... in the polynomial for 2^-r. The constant term is 1.
POWER = (-0.6931470036506653, 0.24022242426872253, -0.05550733581185341, 0.009671512991189957, -0.001326472731307149)
MANTISSA_BITS = 22
FURTHEST = 64.0  # limit of distances, in powers of two in `weigh` and in nats in `_mean`; a token this far away has the weight 0
MEAN_BITS = 16  # fractional bits of the distances whose mean is computed
ROUND = 2.0**23  # adding ROUND to 0 <= x < 2^23 gives an f32 sum whose low bits are the integer nearest to x
TWO = 2.0  # adding TWO to 0.7 < x < 1.5 gives an f32 sum whose low bits are x in units of 2^-MANTISSA_BITS


def sample(logits: Array, rows: Array, numbers: Array, settings: Array, *lists_and_masks: Array) -> tuple[Array, ...]:
    """Draw a token per row. Return the tokens, then the fields of `Logprobs`. In place of a token, NOT_A_NUMBER says that the row,
    after bias, penalties and mask, has a NaN or positive infinity, and NOTHING_LEFT that no token may be drawn. `rows` are the indices of
    the rows in the logits. All parameters except `logits` are the fields of `SampleBatch`, in their order."""
    *lists, masks = lists_and_masks
    tokens = np.zeros(len(rows), np.int32)
    logprobs = _nothing(len(rows))
    for i, row in enumerate(rows):
        setting = settings[i].tolist()
        bias, seen = (tuple(a[starts[i] : starts[i + 1]] for a in arrays) for starts, *arrays in (lists[:3], lists[3:]))
        adjusted = _adjusted(logits[row], numbers[i], bias, seen) if len(bias[0]) or len(seen[0]) else logits[row]
        if setting[Setting.MASK] >= 0:
            adjusted = _masked(adjusted, masks[setting[Setting.MASK]])
        tokens[i], distances = _draw(adjusted, numbers[i], setting)
        if tokens[i] >= 0 and setting[Setting.TOP] >= 0:
            _rank(
                distances if setting[Setting.PROCESSED] == 1 else _distances(logits[row], np.float32(1)),
                int(tokens[i]),
                setting[Setting.TOP],
                logprobs,
                i,
            )
    return (tokens, *logprobs)


def token_logprobs(logits: Array, rows: Array, tokens: Array, tops: Array) -> tuple[Array, ...]:
    """Return the fields of `Logprobs` for given tokens under the unmodified logits. `rows[i]` is the row of the logits that is read for
    token `tokens[i]`, and `tops[i]` is the number of alternatives that are returned for it."""
    logprobs = _nothing(len(rows))
    for i, row in enumerate(rows):
        _rank(_distances(logits[row], np.float32(1)), int(tokens[i]), int(tops[i]), logprobs, i)
    return logprobs


# --- bias, penalties, mask, distances ----------------------------------------------------------------------------------


def _adjusted(logits: Row, number: Row, bias: tuple[Array, ...], seen: tuple[Array, ...]) -> Row:
    """Return the logits after bias and penalties. `bias` has ids and values; `seen` has ids and how often each token was drawn."""
    adjusted = logits.copy()
    for token_id, value in zip(*bias, strict=True):
        adjusted[token_id] += value
    for token_id, count in zip(*seen, strict=True):
        value, repetition = adjusted[token_id], number[Number.REPETITION]
        value = value / repetition if value > 0 else value * repetition
        penalty = number[Number.FREQUENCY] * np.float32(count) + number[Number.PRESENCE]
        adjusted[token_id] = value - penalty if count > 0 else value
    return adjusted


def _masked(logits: Row, mask: Array) -> Row:
    bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
    return np.where(bits == 1, logits, np.float32(-np.inf))


def _distances(logits: Row, sharpness: np.float32) -> Row:
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.fmax.reduce(logits, initial=np.float32(-np.inf)) - logits) * sharpness


# --- drawing a token ---------------------------------------------------------------------------------------------------


def _draw(logits: Row, number: Row, setting: list[int]) -> tuple[int, Row]:
    """Return the drawn token, and the distances from which it was drawn. Return the logits in place of the distances if no token can be
    drawn, or if the best token is taken (temperature 0) and `Setting.PROCESSED` requests no distances."""
    first = int(logits.argmax())
    best, sharpness = logits[first], number[Number.SHARPNESS]
    if not best < np.inf:  # argmax returns the index of a NaN if there is one
        return NOT_A_NUMBER, logits
    if best == -np.inf:
        return NOTHING_LEFT, logits
    if sharpness == 0:
        return first, _distances(logits, np.float32(1)) if setting[Setting.PROCESSED] == 1 else logits
    distances = _distances(logits, sharpness)
    if 0 < setting[Setting.TOP_K] < len(logits):
        distances = _nearest(distances, distances, (distances < np.inf).astype(np.int64), setting[Setting.TOP_K])
    if setting[Setting.TOP_P] < SHARE_ONE:
        weights = weigh(distances)
        distances = _nearest(distances, distances, weights, _share(weights, setting[Setting.TOP_P]))
    distances = np.where(distances <= number[Number.REACH], distances, np.float32(np.inf))
    if setting[Setting.TYPICAL_P] < SHARE_ONE:
        weights = weigh(distances)
        surprise = np.abs(distances - _mean(distances, weights))  # the difference between each token's surprisal and the entropy
        distances = _nearest(distances, surprise, weights, _share(weights, setting[Setting.TYPICAL_P]))
    sums = np.cumsum(weigh(distances))
    random = random_bits(setting[Setting.SEED], setting[Setting.POSITION], setting[Setting.CHOICE])
    drawn = int(np.searchsorted(sums, random * int(sums[-1]) >> RANDOM_BITS, side="right"))
    return min(drawn, len(logits) - 1), distances  # if all weights are 0, `drawn` is beyond the last token


def weigh(distances: Array) -> Array:
    """Return 2^WEIGHT_BITS * exp(-distance), approximately and never rounded up, and 0 for results below 1."""
    with np.errstate(over="ignore"):
        powers = distances * np.float32(LOG2_E)
    powers = np.where(powers < FURTHEST, powers, np.float32(FURTHEST))
    rounded = powers + np.float32(ROUND)
    rest = powers - (rounded - np.float32(ROUND))
    fraction = np.full_like(rest, POWER[-1])
    for coefficient in (*reversed(POWER[:-1]), 1.0):
        fraction = fraction * rest + np.float32(coefficient)
    mantissa = _bits_beyond(fraction + np.float32(TWO), TWO).astype(np.int64)
    return (mantissa << (WEIGHT_BITS - MANTISSA_BITS)) >> np.minimum(_bits_beyond(rounded, ROUND), 63)


def _bits_beyond(numbers: Array, base: float) -> Array:
    """Return, for each of `numbers`, how many steps from one f32 to the next lead to it from `base`."""
    return numbers.view(np.int32) - np.float32(base).view(np.int32)


def _nearest(distances: Row, key: Row, weights: Array, wanted: int) -> Row:
    """Return the distances of the tokens that are kept, and infinity for all others. Tokens are kept by ascending `key`, until their
    weights sum to at least `wanted`."""
    order = np.argsort(key, kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(weights[order]), wanted, side="left")) + 1
    nearest = distances.copy()
    nearest[order[num_kept:]] = np.inf
    return nearest


def _share(weights: Array, share: int) -> int:
    """Return the fraction `share` of the sum of all weights, but at least 1. `share` is in units of 2^-SHARE_BITS."""
    return max(1, int(weights.sum()) * share >> SHARE_BITS)


def _mean(distances: Row, weights: Array) -> np.float32:
    """Return the weighted mean of the distances. The entropy is this mean plus the surprisal of the best token."""
    near = np.where(distances < FURTHEST, distances, np.float32(FURTHEST))
    moments = (weights * np.rint(near * np.float32(1 << MEAN_BITS)).astype(np.int64)) >> MEAN_BITS
    return moments.sum().astype(np.float32) / weights.sum().astype(np.float32)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _rank(distances: Row, token_id: int, num_top: int, logprobs: tuple[Array, ...], i: int) -> None:
    """Write entry `i` of the fields of `Logprobs`: the distance and the rank of a token, the total weight, and at most `num_top` nearest
    tokens with their distances. Tokens that were removed are not among the nearest tokens."""
    own_distances, totals, ranks, top_ids, top_distances = logprobs
    own = distances[token_id]
    own_distances[i], totals[i] = own, weigh(distances).sum()
    ranks[i] = 1 + np.count_nonzero(distances < own) + np.count_nonzero((distances[:token_id] == own) & (own < np.inf))
    order = np.argsort(distances, kind="stable")[:num_top]
    order = order[distances[order] < np.inf]
    top_ids[i, : len(order)], top_distances[i, : len(order)] = order, distances[order]


def _nothing(num_rows: int) -> tuple[Array, ...]:
    """Return the fields of `Logprobs` for rows that requested nothing."""
    shapes = (num_rows, np.float32), (num_rows, np.int64), (num_rows, np.int32)
    return (*(np.zeros(n, t) for n, t in shapes), np.full((num_rows, NUM_TOP), -1, np.int32), np.zeros((num_rows, NUM_TOP), np.float32))
