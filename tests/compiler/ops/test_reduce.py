"""Reductions, cumulative sums and sorting."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.interpret.graph import MismatchError
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import ObjectType, TensorType, TupleType, tensor
from compiler.ops.reduce import ALL, ANY, ARGMAX, ARGMIN, ARGSORT, CUMSUM, MAX, MEAN, MIN, PROD, SORT, SUM, TOP_K
from compiler.ops.tables import INTERPRET

F32, I64 = DType.F32, DType.I64
N = DimVar("n")
BF16 = np.dtype(ml_dtypes.bfloat16)
FOLDS = {SUM: np.sum, PROD: np.prod, MAX: np.max, MIN: np.min, MEAN: np.mean}


@pytest.mark.parametrize("op", FOLDS, ids=lambda op: op.name)
@pytest.mark.parametrize("axes", [None, 0, -1, (0, 2), (2, 1, 0), ()])
@pytest.mark.parametrize("keepdims", [False, True])
def test_folds(run, rng, op, axes, keepdims):
    x = rng.standard_normal((2, 3, 5)).astype(np.float32)
    expected = FOLDS[op](x.astype(np.float64), axis=axes, keepdims=keepdims)
    for shapes in (None, "a b 5"):
        np.testing.assert_allclose(run(op, x, axes=axes, keepdims=keepdims, shapes=shapes), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [SUM, PROD, MAX, MIN], ids=lambda op: op.name)
def test_a_fold_over_nothing_is_the_identity(run, op):
    identity = {SUM: 0, PROD: 1, MAX: np.iinfo(np.int32).min, MIN: np.iinfo(np.int32).max}[op]
    np.testing.assert_array_equal(run(op, np.zeros((2, 0), np.int32), axes=1, shapes="n m"), [identity, identity])
    assert run(op, np.zeros((0, 2), np.float32), axes=1, shapes="n m").shape == (0,)


@pytest.mark.parametrize(("op", "expected"), [(MAX, 3), (MIN, -2)], ids=("max", "min"))
def test_extremes_of_a_type_without_infinity(run, op, expected):
    x = np.array([3, -2, 1], ml_dtypes.float8_e4m3fn)
    assert run(op, x, axes=0, compiled=True) == expected
    assert run(op, x[:1], axes=(), compiled=True) == [3]


def test_small_floats_are_summed_in_f32(run):
    x = np.full((1, 1000), 1.0, BF16)
    np.testing.assert_array_equal(run(SUM, x, axes=1).astype(np.float32), [1000.0])
    np.testing.assert_array_equal(run(MEAN, x, axes=1).astype(np.float32), [1.0])


def test_any_and_all(run):
    x = np.array([[True, False], [True, True], [False, False]])
    np.testing.assert_array_equal(run(ANY, x, axes=1, shapes="n m"), [True, True, False])
    np.testing.assert_array_equal(run(ALL, x, axes=1, shapes="n m"), [False, True, False])
    assert not run(ANY, x[:0])
    assert run(ALL, x[:0])


def test_places_of_extremes(run):
    x = np.array([[1, 5, 5, 0], [7, 7, -1, -1]], np.float32)
    np.testing.assert_array_equal(run(ARGMAX, x, axis=1, shapes="n m"), [1, 0])
    np.testing.assert_array_equal(run(ARGMIN, x, axis=-1, keepdims=True, shapes="n 4"), [[3], [2]])
    x[0, 2] = np.nan
    np.testing.assert_array_equal(run(ARGMAX, x, axis=1), [2, 0])
    with pytest.raises(MismatchError, match="dimension 1 is 0, expected at least 1"):
        run(ARGMAX, x[:, :0], axis=1, shapes="n m")


def test_cumsum(run, rng):
    for x in (rng.standard_normal((3, 4)).astype(np.float32), rng.integers(-9, 9, (3, 4)).astype(np.int8), np.zeros((2, 0), np.float32)):
        for axis in (0, 1, -1):
            np.testing.assert_array_equal(run(CUMSUM, x, axis=axis, shapes="n m"), np.cumsum(x, axis, dtype=x.dtype))


@given(st.lists(st.integers(-5, 5), max_size=9), st.booleans())
@settings(max_examples=30, deadline=None)
def test_sorting_is_stable(values, descending):
    x = np.array(values, np.int32)
    order = INTERPRET["argsort"](x, axis=-1, descending=descending)
    assert list(order) == sorted(range(len(values)), key=lambda i: (-values[i] if descending else values[i], i))
    np.testing.assert_array_equal(INTERPRET["sort"](x, axis=-1, descending=descending), x[order])


def test_order_is_a_host_routine(run, rng):
    x = rng.standard_normal((3, 6)).astype(np.float32)
    np.testing.assert_array_equal(run(SORT, x, shapes="n m"), np.sort(x, -1))
    np.testing.assert_array_equal(run(ARGSORT, x, axis=0, descending=True, shapes="n m"), np.argsort(-x, 0))
    values, places = run(TOP_K, x, k=2, shapes="n 6")
    np.testing.assert_array_equal(values, -np.sort(-x, -1)[:, :2])
    np.testing.assert_array_equal(places, np.argsort(-x, -1)[:, :2])
    values, _ = run(TOP_K, x, k=lambda d: d["n"] - 1, axis=0, largest=False, shapes="n m")
    np.testing.assert_array_equal(values, np.sort(x, 0)[:2])


def test_deduction(deduced):
    x = tensor((N, 4, N + 1), F32)
    assert deduced(SUM, x, axes=(0, -1)) == tensor((4,), F32)
    assert deduced(MAX, x, axes=1, keepdims=True) == tensor((N, 1, N + 1), F32)
    assert deduced(MEAN, x) == tensor((), F32)
    assert deduced(SUM, TensorType(None, F32, 3), axes=(0, 1)) == TensorType(None, F32, 1)
    assert deduced(SUM, ObjectType(), axes=0) == TensorType(None, None)
    assert deduced(ARGMAX, x, axis=1) == tensor((N, N + 1), I64)
    assert deduced(ARGMIN, TensorType(None, F32), axis=1) == TensorType(None, I64)
    assert deduced(TOP_K, x, k=3, axis=1) == TupleType((tensor((N, 3, N + 1), F32), tensor((N, 3, N + 1), I64)))
    assert deduced(ARGSORT, x) == tensor((N, 4, N + 1), I64)


def test_refusals(deduced):
    x = tensor((N, 4), F32)
    with pytest.raises(AnnotationError, match="attribute axes is 2, expected an axis of a tensor of rank 2"):
        deduced(SUM, x, axes=2)
    with pytest.raises(AnnotationError, match="holds bool, expected numbers"):
        deduced(SUM, tensor((4,), DType.BOOL))
    with pytest.raises(AnnotationError, match="holds i32, expected floats"):
        deduced(MEAN, tensor((4,), DType.I32))
    with pytest.raises(AnnotationError, match="holds f32, expected bool"):
        deduced(ALL, x)
    with pytest.raises(AnnotationError, match="keepdims is 1, expected true or false"):
        deduced(SUM, x, keepdims=1)
    with pytest.raises(AnnotationError, match="dimension 0 is 0, expected at least 1"):
        deduced(ARGMAX, tensor((0,), F32), axis=0)
    with pytest.raises(AnnotationError, match=r"attribute k is 5, expected at most 4"):
        deduced(TOP_K, x, k=5)
    with pytest.raises(AnnotationError, match="attribute k is 'a'"):
        deduced(TOP_K, x, k="a")
    with pytest.raises(AnnotationError, match="needs the attribute axis"):
        deduced(CUMSUM, x)


def test_an_attribute_of_the_wrong_kind_is_refused_whatever_was_deduced_before(deduced):
    """1, 1.0 and True are equal numbers. Deductions are cached."""
    x = tensor((7, 11), F32)
    assert deduced(SUM, x, axes=0, keepdims=True) == tensor((1, 11), F32)
    assert deduced(ARGMAX, x, axis=1) == tensor((7,), DType.I64)
    for value in (1, 1.0):
        with pytest.raises(AnnotationError, match=f"keepdims is {value}, expected true or false"):
            deduced(SUM, x, axes=0, keepdims=value)
    for value in (True, 1.0):
        with pytest.raises(AnnotationError, match=f"axis is {value}, expected an integer"):
            deduced(ARGMAX, x, axis=value)


@pytest.mark.parametrize("axes", [np.array([0]), {0}], ids=["array", "set"])
def test_an_attribute_that_cannot_be_hashed_is_refused_like_others(deduced, axes):
    with pytest.raises(AnnotationError, match="axes"):
        deduced(SUM, tensor((7, 11), F32), axes=axes)
