"""Attention within each of several texts that are concatenated without padding, and pooling: the mean and the maximum over the tokens of
each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, Type, tensor
from compiler.ops.attention.ragged import RAGGED_ATTENTION, RAGGED_MAX, RAGGED_MEAN

F32, I32 = DType.F32, DType.I32
Run = Callable[..., Any]
T, N = DimVar("t"), DimVar("n")


def texts(lengths: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), starts


# Lengths of texts in tokens. A batch has fewer tokens than a vector has lanes, or several texts within a vector, or texts that end where a
# vector ends or after that, or an empty text, or no text.
@pytest.mark.covering("lengths", "size", "furthest")
@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [16, 16], [5, 0, 9, 2, 1], [40, 7], []], ids=str)
@pytest.mark.parametrize("size", [4, 16, 19])
@pytest.mark.parametrize("furthest", [0, 3])  # the largest relative distance between tokens that has its own bias; 0: no bias
def test_attention_within_each_text(run: Run, rng: Generator, lengths: list[int], size: int, furthest: int) -> None:
    text_ids, starts = texts(lengths)
    q, k, v = (rng.standard_normal((len(text_ids), 3, size)).astype(np.float32) for _ in range(3))
    bias = () if not furthest else (rng.standard_normal((3, 2 * furthest + 1)).astype(np.float32),)
    shapes = f"t 3 {size}, t 3 {size}, t 3 {size}, t, n"
    found = run(RAGGED_ATTENTION, q, k, v, text_ids, starts, *bias, scale=0.4, shapes=shapes, compiled=True)
    for t, h in np.ndindex(len(text_ids), 3):
        keys = np.flatnonzero(text_ids == text_ids[t])
        score = k[keys, h] @ q[t, h] * 0.4
        for table in bias:
            score = score + table[h, np.clip(keys - t, -furthest, furthest) + furthest]
        e = np.exp(score - score.max())
        np.testing.assert_allclose(found[t, h], e @ v[keys, h] / e.sum(), rtol=2e-5, atol=2e-6)


def test_attention_of_half_precision(run: Run, rng: Generator) -> None:
    text_ids, starts = texts([5, 20])
    q, k, v = (rng.standard_normal((25, 2, 8)).astype(ml_dtypes.bfloat16) for _ in range(3))
    run(RAGGED_ATTENTION, q, k, v, text_ids, starts, scale=1.0, shapes="t 2 8, t 2 8, t 2 8, t, n", compiled=True)


def test_a_neighbour_full_of_nan_harms_nobody(run: Run, rng: Generator) -> None:
    text_ids, starts = texts([5, 4, 9])
    q, k, v = (rng.standard_normal((18, 2, 8)).astype(np.float32) for _ in range(3))
    shapes = "t 2 8, t 2 8, t 2 8, t, n"
    clean = run(RAGGED_ATTENTION, q, k, v, text_ids, starts, scale=1.0, shapes=shapes, compiled=True)
    for x in (q, k, v):
        x[5:9] = np.nan
    found = run(RAGGED_ATTENTION, q, k, v, text_ids, starts, scale=1.0, shapes=shapes, compiled=True)
    np.testing.assert_array_equal(found[[*range(5), *range(9, 18)]], clean[[*range(5), *range(9, 18)]])


@pytest.mark.parametrize("lengths", [[1], [3, 1, 20], []], ids=str)
def test_maximum_of_each_text(run: Run, rng: Generator, lengths: list[int]) -> None:
    _, starts = texts(lengths)
    x = rng.standard_normal((sum(lengths), 21)).astype(np.float32)
    found = run(RAGGED_MAX, x, starts, shapes="t 21, n", compiled=True)
    expected = [x[a : a + n].max(0) for a, n in zip(starts, lengths, strict=False)]
    np.testing.assert_array_equal(found, np.reshape(np.array(expected, np.float32), (len(lengths), 21)))


@pytest.mark.parametrize("lengths", [[1], [3, 1, 20], []], ids=str)
def test_mean_of_each_text(run: Run, rng: Generator, lengths: list[int]) -> None:
    _, starts = texts(lengths)
    x = rng.standard_normal((sum(lengths), 21)).astype(np.float32)
    found = run(RAGGED_MEAN, x, starts, shapes="t 21, n", compiled=True)
    expected = [x[a : a + n].astype(np.float64).mean(0) for a, n in zip(starts, lengths, strict=False)]
    np.testing.assert_allclose(found, np.reshape(expected, (len(lengths), 21)), rtol=1e-5, atol=1e-6)


def test_deduction(deduced: Callable[..., Type]) -> None:
    q, ids, starts = tensor((T, 4, 8), F32), tensor((T,), I32), tensor((N,), I32)
    assert deduced(RAGGED_ATTENTION, q, q, q, ids, starts, scale=1.0) == q
    assert deduced(RAGGED_ATTENTION, q, q, q, ids, starts, tensor((4, 7), F32), scale=1.0) == q
    assert deduced(RAGGED_ATTENTION, TensorType(None, F32), q, q, ids, starts, scale=1.0) == TensorType(None, F32)
    assert deduced(RAGGED_MEAN, tensor((T, 8), F32), starts) == tensor((Dim.of(N) - 1, 8), F32)
    assert deduced(RAGGED_MEAN, tensor((T, 8), F32), TensorType(None, I32)) == TensorType(None, F32, 2)
    refused = [
        ("k has rank 2, expected 3", RAGGED_ATTENTION, (q, tensor((T, 32), F32), q, ids, starts), {"scale": 1.0}),
        ("dimension 1 of v is 2, expected 4", RAGGED_ATTENTION, (q, q, tensor((T, 2, 8), F32), ids, starts), {"scale": 1.0}),
        ("text_ids holds f32", RAGGED_ATTENTION, (q, q, q, tensor((T,), F32), starts), {"scale": 1.0}),
        ("heads of bias is 3, expected 4", RAGGED_ATTENTION, (q, q, q, ids, starts, tensor((3, 7), F32)), {"scale": 1.0}),
        (
            "bias has 6 entries per head, expected an odd number",
            RAGGED_ATTENTION,
            (q, q, q, ids, starts, tensor((4, 6), F32)),
            {"scale": 1.0},
        ),
        ("x has rank 3, expected 2", RAGGED_MEAN, (q, starts), {}),
    ]
    for message, op, types, attrs in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types, **attrs)
