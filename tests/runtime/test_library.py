from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import UnknownName
from runtime.library import LIBRARY, routine

X = np.array([[3, 1, 3], [2, 2, 0]], np.int32)


def test_sort_keeps_the_order_of_equal_elements() -> None:
    assert routine("argsort").compute(X, 1, False)[0].tolist() == [[1, 0, 2], [2, 0, 1]]
    assert routine("argsort").compute(X, 1, True)[0].tolist() == [[0, 2, 1], [0, 1, 2]]
    assert routine("sort").compute(X, 0, False)[0].tolist() == [[2, 1, 0], [3, 2, 3]]


@given(st.lists(st.integers(-3, 3), max_size=12), st.booleans())
def test_argsort_against_python(values: list[int], descending: bool) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i] if descending else values[i])
    assert routine("argsort").compute(np.array(values, np.int8), 0, descending)[0].tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_counts_as_the_largest(dtype: type) -> None:
    x = np.array([1, np.nan, -np.inf, 2], dtype)
    assert routine("argsort").compute(x, 0, False)[0].tolist() == [2, 0, 3, 1]
    values, indices = routine("topk").compute(x, 2, 0, True)
    assert indices.tolist() == [1, 3] and np.isnan(values[0]) and values[1] == 2


def test_topk_prefers_the_first_of_equals() -> None:
    values, indices = routine("topk").compute(np.array([5, 7, 7, 7]), 2, 0, True)
    assert values.tolist() == [7, 7] and indices.tolist() == [1, 2]
    values, indices = routine("topk").compute(X, 1, -1, False)
    assert values.tolist() == [[1], [0]] and indices.tolist() == [[1], [2]]


def test_cumsum_stays_in_the_element_type() -> None:
    (sums,) = routine("cumsum").compute(np.array([100, 100, 100], np.uint8), 0)
    assert sums.tolist() == [100, 200, 44] and sums.dtype == np.uint8
    (sums,) = routine("cumsum").compute(np.array([256, 1, 1], ml_dtypes.bfloat16), 0)
    assert sums.tolist() == [256, 256, 256] and sums.dtype == ml_dtypes.bfloat16


def test_data_dependent_results() -> None:
    assert routine("unique").compute(X)[0].tolist() == [0, 1, 2, 3]
    assert np.array_equal(routine("unique").compute(np.array([2, np.nan, 1], ml_dtypes.bfloat16))[0][:2], [1, 2])
    assert routine("nonzero").compute(np.array([[0, 1], [2, 0]]))[0].tolist() == [[0, 1], [1, 0]]
    assert routine("nonzero").compute(np.zeros((2, 2)))[0].shape == (2, 0)


def test_signatures_say_how_to_call() -> None:
    assert routine("topk").signature == "lib.topk(x, k, axis, largest, values, indices)"
    assert routine("unique").signature == "lib.unique(x) -> values"


def test_an_unknown_routine_lists_what_is_known() -> None:
    with pytest.raises(UnknownName, match=f"unknown library routine 'fft'; known: {', '.join(sorted(LIBRARY))}"):
        routine("fft")
