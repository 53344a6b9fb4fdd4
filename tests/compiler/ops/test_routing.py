"""Choosing experts for tokens and grouping rows by expert: ties, NaN scores and the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, Type
from compiler.ops.routing import GROUP_ROWS, SUM_ROWS, TOP_EXPERTS

Run = Callable[..., Any]


def test_of_equal_scores_the_lower_expert_is_chosen(run: Run) -> None:
    scores = np.float32([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [3, 1, 3, 1, 3], [-0.0, 0.0, -1, -1, 5]])
    found = run(TOP_EXPERTS, scores, shapes="t 5", compiled=True, k=2)
    np.testing.assert_array_equal(found, [[1, 2], [0, 1], [0, 2], [0, 4]])


def test_what_is_not_a_number_is_the_worst(run: Run) -> None:
    """A NaN score ranks below all other scores, and every token still gets k experts."""
    scores = np.float32([[np.nan, -1, np.nan, -2], [np.nan] * 4, [np.inf, -np.inf, np.nan, 0]])
    found = run(TOP_EXPERTS, scores, shapes="t 4", compiled=True, k=3)
    np.testing.assert_array_equal(found, [[0, 1, 3], [0, 1, 2], [0, 1, 3]])


@pytest.mark.parametrize("k", [1, 8, 33])
def test_the_best_are_chosen_in_ascending_order(run: Run, rng: np.random.Generator, k: int) -> None:
    scores = rng.standard_normal((9, 33)).astype(np.float32)
    found = run(TOP_EXPERTS, scores, shapes="t e", compiled=True, k=k)
    np.testing.assert_array_equal(found, np.sort(np.argsort(-scores, axis=1)[:, :k], axis=1))


def test_more_experts_than_there_are_cannot_be_chosen(deduced: Callable[..., Type]) -> None:
    with pytest.raises(AnnotationError, match="attribute k is 5, expected at most 4, the number of experts"):
        deduced(TOP_EXPERTS, TensorType((Dim.of(DimVar("t")), Dim.of(4)), DType.F32), k=5)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_rows_of_an_expert_stand_together_in_the_order_of_tokens(run: Run, rng: np.random.Generator, tokens: int) -> None:
    experts = np.sort(rng.permuted(np.tile(np.arange(6, dtype=np.int32), (tokens, 1)), axis=1)[:, :3], axis=1)
    of_rows, chosen, places = run(GROUP_ROWS, experts, shapes="t 3", compiled=True, count=6)
    np.testing.assert_array_equal(chosen, np.sort(experts.reshape(-1)))
    for e in range(6):
        assert of_rows[chosen == e].tolist() == np.flatnonzero((experts == e).any(1)).tolist()
    np.testing.assert_array_equal(chosen[places], experts)
    np.testing.assert_array_equal(of_rows[places], np.arange(tokens)[:, None].repeat(3, 1))


def test_an_expert_that_does_not_exist_is_brought_into_range(run: Run) -> None:
    _, chosen, _ = run(GROUP_ROWS, np.int32([[-1, 2], [7, 1]]), compiled=True, count=3)
    assert chosen.tolist() == [0, 1, 2, 2]


def test_shares_are_added_in_order(run: Run) -> None:
    """The weighted outputs of a token's experts are added in the order in which the token lists its experts. Here the two large numbers
    cancel exactly only if they are added first."""
    y = np.float32([[1e8], [1.0], [-1e8]] * 2)
    shares = np.ones((2, 3), np.float32)
    found = run(SUM_ROWS, y, np.int32([[0, 1, 2], [3, 5, 4]]), shares, compiled=True)
    assert found.tolist() == [[0.0], [1.0]]
