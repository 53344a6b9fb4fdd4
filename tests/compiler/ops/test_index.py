"""Gather and scatter at indices that are computed at run time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import CallTir
from compiler.ir.text.parser import parse
from compiler.ir.types import ObjectType, TensorType, tensor
from compiler.ops.embedding import EMBEDDING
from compiler.ops.index import GATHER, SCATTER, SCATTER_INPLACE, TAKE
from compiler.ops.tables import INTERPRET
from compiler.passes.legalize import legalize
from runtime.errors import ArgumentMismatch
from runtime.session import Session

F32, I32, I64 = DType.F32, DType.I32, DType.I64
N, M = DimVar("n"), DimVar("m")
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_take(run):
    ids = np.array([[2, 0], [1, 1]], np.int32)
    for axis in (1, 2, -1):
        np.testing.assert_array_equal(run(TAKE, X, ids, axis=axis, shapes="a b c, i j"), np.take(X, ids, axis))
    np.testing.assert_array_equal(run(TAKE, X, np.array(1, np.int64), axis=0, shapes="a b c, "), X[1])
    assert run(TAKE, X, ids[:0], axis=1).shape == (2, 0, 2, 4)


def test_reading_clamps(run):
    np.testing.assert_array_equal(run(TAKE, X, np.array([-1, 9], np.int32), axis=1), X[:, [0, 2]])
    np.testing.assert_array_equal(run(GATHER, X[0], np.array([[-1, 9, 1, 1]], np.int32)[:, :4].repeat(3, 0), axis=1), X[0][:, [0, 3, 1, 1]])


@pytest.mark.parametrize("program", ["take(x, i, axis=0)", "embedding(x, i)", "gather(x, j, axis=0)"])
def test_an_axis_without_elements_is_refused(program):
    """Indexing along an axis without elements is refused, because indices are clamped to the axis, and there is no element to clamp to."""
    text = f"func main(x: f32[n, 4], i: i32[k], j: i32[k, 4]) -> f32[k, 4] {{ y = {program} return y }}"
    session, i, j = Session(compile_module(parse(text))), np.ones(2, np.int32), np.ones((2, 4), np.int32)
    with pytest.raises(ArgumentMismatch, match=r"expected max\(n, .* = 1, got 0"):
        session.call("main", X[0, :0], i, j)
    assert session.call("main", X[0, :0], i[:0], j[:0]).shape == (0, 4)
    session.close()


def test_no_indices_need_no_elements(run, meaning):
    none = np.ones(0, np.int32)
    assert run(TAKE, X[:0, 0], none, axis=0, shapes="n m, k", compiled=True).shape == (0, 4)
    with pytest.raises(IndexError, match="operand indices has 3 indices, and there is nothing to read"):
        meaning(TAKE, X[:0, :0, 0], np.ones(3, np.int32), axis=1)


def test_small_integers_are_indices_into_long_axes(run):
    x, ids = np.arange(1000, dtype=np.float32), np.array([-128, 127, 3], np.int8)
    for op in (TAKE, GATHER):
        np.testing.assert_array_equal(run(op, x, ids, axis=0), [0, 127, 3])
    np.testing.assert_array_equal(run(EMBEDDING, x[:, None], ids.view(np.uint8)), [[128], [127], [3]])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_gather_and_scatter_are_numpys(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    extent = data.draw(st.integers(0, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.integers(0, 99, shape)
    indices = rng.integers(0, shape[axis], (*shape[:axis], extent, *shape[axis + 1 :]))
    np.testing.assert_array_equal(INTERPRET["gather"](x, indices, axis=axis), np.take_along_axis(x, indices, axis))
    updates = rng.integers(100, 199, indices.shape)
    expected = x.copy()
    for place in np.ndindex(indices.shape):
        at = list(place)
        at[axis] = indices[place]
        expected[tuple(at)] = updates[place]
    np.testing.assert_array_equal(INTERPRET["scatter"](x, indices, updates, axis=axis), expected)


def test_gather(run):
    ids = np.array([[[1, 0, 0, 1]], [[2, 2, 1, 0]]], np.int64)
    np.testing.assert_array_equal(run(GATHER, X, ids, axis=1, shapes="a b c, a d c"), np.take_along_axis(X, ids, 1))
    np.testing.assert_array_equal(run(GATHER, X, ids, axis=1, shapes="a b c, e d f"), np.take_along_axis(X, ids, 1))


@pytest.mark.parametrize("op", [SCATTER, SCATTER_INPLACE], ids=lambda op: op.name)
def test_scatter_keeps_the_last_and_skips_what_is_outside(run, op):
    x, updates = np.zeros((2, 4), np.float32), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    ids = np.array([[1, 1, -1], [0, 4, 0]], np.int32)
    for shapes in (None, "n m, n k, n k", "n m, a b, c d"):
        np.testing.assert_array_equal(run(op, x, ids, updates, axis=1, shapes=shapes), [[0, 2, 0, 0], [6, 0, 0, 0]])


def test_scatter_inplace_writes_into_its_operand():
    x, ids, new = Var("x", tensor((N,), F32)), Var("ids", tensor((M,), I32)), Var("new", tensor((M,), F32))
    builder = Builder()
    with builder.function("main", [x, ids, new], pure=False):
        builder.returns(builder.call(SCATTER_INPLACE, x, ids, new, axis=0))
    module = legalize(builder.finish())
    value = module.graph("main").body.bindings[-1].value
    assert isinstance(value, CallTir)
    assert value.inplace == (0,)
    found = Interpreter(module).call("main", np.zeros(3, np.float32), np.array([2], np.int32), np.ones(1, np.float32))
    np.testing.assert_array_equal(found, [0, 0, 1])


def test_deduction(deduced):
    x = tensor((N, 4), F32)
    assert deduced(TAKE, x, tensor((M, 2), I32), axis=0) == tensor((M, 2, 4), F32)
    assert deduced(TAKE, x, TensorType(None, I32, 1), axis=0) == TensorType(None, F32, 2)
    assert deduced(TAKE, ObjectType(), tensor((M,), I32), axis=0) == TensorType(None, None)
    assert deduced(GATHER, x, tensor((N, M), I64), axis=1) == tensor((N, M), F32)
    assert deduced(GATHER, x, TensorType(None, I64), axis=1) == TensorType(None, F32, 2)
    assert deduced(SCATTER, x, tensor((N, M), I64), tensor((N, M), F32), axis=1) == x


def test_refusals(deduced):
    x = tensor((3, 4), F32)
    with pytest.raises(AnnotationError, match="indices holds f32, expected integers"):
        deduced(TAKE, x, x, axis=0)
    with pytest.raises(AnnotationError, match="indices have rank 1, expected 2"):
        deduced(GATHER, x, tensor((3,), I32), axis=0)
    with pytest.raises(AnnotationError, match="dimension 0 of the indices is 2, expected 3"):
        deduced(GATHER, x, tensor((2, 1), I32), axis=1)
    with pytest.raises(AnnotationError, match="dimension 1 of the updates is 2, expected 1"):
        deduced(SCATTER, x, tensor((3, 1), I32), tensor((3, 2), F32), axis=1)
    with pytest.raises(AnnotationError, match="element types f32, i32"):
        deduced(SCATTER, x, tensor((3, 1), I32), tensor((3, 1), I32), axis=1)
