"""Operators that move elements: views, permutations, broadcasts, slices, splits and concatenation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import Call, MatchCast
from compiler.ir.types import ObjectType, ShapeType, TensorType, TupleType, tensor
from compiler.ops.broadcast import broadcast_shapes
from compiler.ops.manipulate import (
    BROADCAST_TO,
    CONCAT,
    EXPAND_DIMS,
    FLIP,
    PERMUTE_DIMS,
    RESHAPE,
    SLICE,
    SPLIT,
    SQUEEZE,
)
from compiler.ops.tables import UnknownShape
from compiler.passes.legalize import legalize

F32 = DType.F32
N, M = DimVar("n"), DimVar("m")
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
COARSE = TensorType(None, F32)


def ints(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


# --- views -------------------------------------------------------------------------------------------------------------


def test_reshape_keeps_the_elements_in_order(run):
    np.testing.assert_array_equal(run(RESHAPE, X, (4, 6)), X.reshape(4, 6))
    np.testing.assert_array_equal(run(RESHAPE, X, ("n", 12), shapes="n 3 4"), X.reshape(2, 12))
    np.testing.assert_array_equal(run(RESHAPE, ints(0, 5), (5, 0), shapes="0 5"), ints(5, 0))
    assert run(RESHAPE, ints(1), ()).shape == ()


def test_reshape_refuses_another_number_of_elements(deduced):
    with pytest.raises(AnnotationError, match="number of elements is 6, expected 8"):
        deduced(RESHAPE, tensor((2, 3), F32), ShapeType((Dim.of(8),)))
    with pytest.raises(AnnotationError, match=r"number of elements is 3\*n, expected 3\*n \+ 1"):
        deduced(RESHAPE, tensor((N, 3), F32), ShapeType((N * 3 + 1,)))
    with pytest.raises(AnnotationError, match="dimension 0 of the shape is -1"):
        deduced(RESHAPE, tensor((N, 3), F32), ShapeType((Dim.of(-1),)))


def test_reshape_of_unproved_counts_is_checked_before_it_runs():
    x = Var("x", tensor((N, M), F32))
    builder = Builder()
    with builder.function("main", [x]):
        builder.returns(builder.call(RESHAPE, x, ShapeValue((Dim.of(M), Dim.of(4)))))
    legal = legalize(builder.finish())
    bindings = legal.graph("main").body.bindings
    assert isinstance(bindings[0].value, MatchCast)
    assert isinstance(bindings[1].value, Call)
    assert Interpreter(legal).call("main", np.zeros((4, 3), np.float32)).shape == (3, 4)
    with pytest.raises(MismatchError, match="is 15, expected"):
        Interpreter(legal).call("main", np.zeros((5, 3), np.float32))


def test_a_view_of_proved_counts_needs_no_legalizing():
    x = Var("x", tensor((N, 4), F32))
    builder = Builder()
    with builder.function("main", [x]):
        builder.returns(builder.call(RESHAPE, x, ShapeValue((N * 4,))))
    module = builder.finish()
    assert legalize(module) is module


def test_expand_and_squeeze_undo_each_other(run):
    for axes in (0, -1, (0, 2), (1, -1)):
        wide = run(EXPAND_DIMS, X, axes=axes, shapes="n m 4")
        np.testing.assert_array_equal(wide, np.expand_dims(X, axes))
        np.testing.assert_array_equal(run(SQUEEZE, wide, axes=axes), X)
    np.testing.assert_array_equal(run(SQUEEZE, X[:1], axes=0, shapes="n m 4"), X[0])


def test_squeeze_names_the_dimension_that_is_not_1(deduced):
    with pytest.raises(AnnotationError, match="dimension 1 is 3, expected 1"):
        deduced(SQUEEZE, tensor((1, 3), F32), axes=(1,))
    with pytest.raises(AnnotationError, match="expected an axis of a tensor of rank 2"):
        deduced(SQUEEZE, tensor((1, 3), F32), axes=2)
    with pytest.raises(AnnotationError, match="names an axis twice"):
        deduced(EXPAND_DIMS, tensor((3,), F32), axes=(0, 0))


def test_views_of_little_known_tensors(deduced):
    assert deduced(RESHAPE, COARSE, ShapeType((Dim.of(N),))) == tensor((N,), F32)
    assert deduced(RESHAPE, tensor((N,), F32), ShapeType(None, 2)) == TensorType(None, F32, 2)
    assert deduced(RESHAPE, ObjectType(), ShapeType(None)) == TensorType(None, None)
    assert deduced(EXPAND_DIMS, TensorType(None, F32, 2), axes=(0, 1)) == TensorType(None, F32, 4)
    assert deduced(SQUEEZE, TensorType(None, F32, 2), axes=(0,)) == TensorType(None, F32, 1)
    assert deduced(SQUEEZE, COARSE, axes=(0,)) == COARSE


# --- broadcast, permute, flip ------------------------------------------------------------------------------------------


def test_broadcast_to(run):
    row = ints(1, 4)
    np.testing.assert_array_equal(run(BROADCAST_TO, row, (2, 3, 4)), np.broadcast_to(row, (2, 3, 4)))
    np.testing.assert_array_equal(run(BROADCAST_TO, row[0], (3, "n"), shapes="n"), np.broadcast_to(row, (3, 4)))
    assert run(BROADCAST_TO, np.array(3, np.float32), (2, 0)).shape == (2, 0)


def test_broadcast_to_refuses(deduced):
    with pytest.raises(AnnotationError, match="extent 3 does not broadcast to 4"):
        deduced(BROADCAST_TO, tensor((3,), F32), ShapeType((Dim.of(4),)))
    with pytest.raises(AnnotationError, match="rank 2, expected at most 1"):
        deduced(BROADCAST_TO, tensor((3, 3), F32), ShapeType((Dim.of(3),)))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_broadcasting_of_known_extents_is_numpys(data):
    a = data.draw(st.lists(st.integers(0, 3), max_size=3))
    b = data.draw(st.lists(st.integers(0, 3), max_size=3))
    dims_a, dims_b = tuple(map(Dim.of, a)), tuple(map(Dim.of, b))
    try:
        expected = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        with pytest.raises(AnnotationError):
            broadcast_shapes(dims_a, dims_b)
        return
    found = broadcast_shapes(dims_a, dims_b)
    assert found is not None
    assert tuple(d.const for d in found) == expected


def test_broadcasting_of_symbolic_extents():
    n, m, two = Dim.of(N), Dim.of(M), Dim.of(DimVar("k", lower=2))
    assert broadcast_shapes((n,), (n,)) == (n,)
    assert broadcast_shapes((n,), (Dim.of(1),)) == (n,)
    assert broadcast_shapes((n,), (Dim.of(4),)) == (Dim.of(4),)
    assert broadcast_shapes((n,), (two,)) == (two,)
    assert broadcast_shapes((Dim.of(4),), (two,)) == (Dim.of(4),)
    (both,) = broadcast_shapes((n,), (m,))
    assert broadcast_shapes((both,), (n,)) == broadcast_shapes((m,), (both,)) == (both,)
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 7), (7, 1), (7, 7)):
        assert (both.evaluate({N: a, M: b}),) == np.broadcast_shapes((a,), (b,))
    with pytest.raises(AnnotationError):
        broadcast_shapes((two,), (two + 1,))


def test_permute_and_flip(run, deduced):
    np.testing.assert_array_equal(run(PERMUTE_DIMS, X, shapes="a b c"), X.T)
    np.testing.assert_array_equal(run(PERMUTE_DIMS, X, axes=(1, -1, 0), shapes="a b c"), X.transpose(1, 2, 0))
    np.testing.assert_array_equal(run(FLIP, X, axes=(0, -1), shapes="a b c"), X[::-1, :, ::-1])
    np.testing.assert_array_equal(run(FLIP, X[:0], axes=0), X[:0])
    assert deduced(PERMUTE_DIMS, TensorType(None, F32, 2)) == TensorType(None, F32, 2)
    with pytest.raises(AnnotationError, match="names 1 axes, expected all 3"):
        deduced(PERMUTE_DIMS, tensor((1, 2, 3), F32), axes=(0,))


# --- slice and split ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin, end, stride", [(0, None, 1), (1, 3, 1), (0, 99, 2), (3, 1, 1), (9, None, 3), (1, None, 2), (2, 0, 1)])
@pytest.mark.parametrize("shapes", [None, "a b c"])
def test_slice(run, begin, end, stride, shapes):
    for axis in (0, 1, -1):
        place = [slice(None)] * 3
        place[axis] = slice(begin, end, stride)
        np.testing.assert_array_equal(run(SLICE, X, axis=axis, begin=begin, end=end, stride=stride, shapes=shapes), X[tuple(place)])


def test_slice_at_symbolic_places(run):
    ids = ints(2)
    found = run(SLICE, X, axis=2, begin=lambda d: d["n"] - 1, end=lambda d: d["n"] + 1, shapes="n b c")
    np.testing.assert_array_equal(found, X[:, :, 1:3])
    assert run(SLICE, ids, axis=0, begin=lambda d: Dim.of(d["n"]), shapes="n").shape == (0,)


def test_slice_has_the_simplest_extent(deduced):
    wide = Dim.of(DimVar("w", lower=8))
    assert deduced(SLICE, tensor((wide,), F32), axis=0, begin=2, end=6) == tensor((4,), F32)
    assert deduced(SLICE, tensor((wide,), F32), axis=0, begin=2) == tensor((wide - 2,), F32)
    assert deduced(SLICE, TensorType(None, F32, 1), axis=0) == TensorType(None, F32, 1)


def test_slice_refuses(deduced):
    with pytest.raises(AnnotationError, match="attribute begin is -1, expected at least 0"):
        deduced(SLICE, tensor((4,), F32), axis=0, begin=-1)
    with pytest.raises(AnnotationError, match="attribute stride is 0"):
        deduced(SLICE, tensor((4,), F32), axis=0, stride=0)
    with pytest.raises(AnnotationError, match="attribute axis is 'x', expected an integer"):
        deduced(SLICE, tensor((4,), F32), axis="x")
    with pytest.raises(AnnotationError, match=r"has 2 operands, expected \(x\)"):
        deduced(SLICE, tensor((4,), F32), tensor((4,), F32), axis=0)


def test_split(run):
    parts = run(SPLIT, X, axis=-1, sizes=(1, 0, 3), shapes="a b c")
    for part, expected in zip(parts, np.split(X, [1, 1], -1), strict=True):
        np.testing.assert_array_equal(part, expected)
    first, rest = run(SPLIT, X, axis=1, sizes=lambda d: (1, d["b"] - 1), shapes="a b c")
    np.testing.assert_array_equal(first, X[:, :1])
    np.testing.assert_array_equal(rest, X[:, 1:])


def test_a_split_into_one_part_is_a_tuple_all_the_same(run):
    (whole,) = run(SPLIT, X, axis=0, sizes=(X.shape[0],), compiled=True)
    np.testing.assert_array_equal(whole, X)


def test_split_wants_the_whole(deduced):
    with pytest.raises(AnnotationError, match="sum of the sizes is 5, expected 4"):
        deduced(SPLIT, tensor((4,), F32), axis=0, sizes=(2, 3))
    with pytest.raises(AnnotationError, match="sizes is empty"):
        deduced(SPLIT, tensor((4,), F32), axis=0, sizes=())
    assert deduced(SPLIT, COARSE, axis=0, sizes=(2, 2)) == TupleType((COARSE, COARSE))


# --- concat ------------------------------------------------------------------------------------------------------------


def test_concat(run):
    a, b, c = ints(2, 3), ints(1, 3) + 50, ints(0, 3)
    for shapes in (None, "n k, m k, l k", "n k, m j, l 3"):
        np.testing.assert_array_equal(run(CONCAT, a, b, c, axis=0, shapes=shapes), np.concatenate([a, b, c]))
    np.testing.assert_array_equal(run(CONCAT, a, a + 9, axis=-1, shapes="n 3, n 3"), np.concatenate([a, a + 9], 1))
    np.testing.assert_array_equal(run(CONCAT, a, axis=0), a)


def test_concat_refuses(deduced):
    with pytest.raises(AnnotationError, match="dimension 1 of operand 1 is 4, expected 3"):
        deduced(CONCAT, tensor((2, 3), F32), tensor((2, 4), F32), axis=0)
    with pytest.raises(AnnotationError, match="element types f32, i32"):
        deduced(CONCAT, tensor((2,), F32), tensor((2,), DType.I32), axis=0)
    with pytest.raises(AnnotationError, match="ranks 1, 2"):
        deduced(CONCAT, tensor((2,), F32), tensor((2, 2), F32), axis=0)
    with pytest.raises(AnnotationError, match=r"has 0 operands, expected \(\*xs\)"):
        deduced(CONCAT, axis=0)
    assert deduced(CONCAT, tensor((2, 3), F32), TensorType(None, F32, 2), axis=0) == TensorType(None, F32, 2)
    assert deduced(CONCAT, tensor((2,), F32), ObjectType(), axis=0) == TensorType(None, F32, 1)


def test_unproved_extents_of_joined_tensors_are_checked():
    xs = [Var("x", tensor((2, N), F32)), Var("y", tensor((2, M), F32))]
    builder = Builder()
    with builder.function("main", xs):
        builder.returns(builder.call(CONCAT, *xs, axis=0))
    legal = legalize(builder.finish())
    assert Interpreter(legal).call("main", np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)).shape == (4, 3)
    with pytest.raises(MismatchError, match="dimension 1 is 4, expected n = 3"):
        Interpreter(legal).call("main", np.zeros((2, 3), np.float32), np.ones((2, 4), np.float32))


def test_a_loop_nest_needs_extents():
    builder = Builder()
    x = Var("x", TensorType(None, F32, 2))
    with builder.function("main", [x]):
        builder.returns(builder.call(PERMUTE_DIMS, x, name="turned"))
    with pytest.raises(UnknownShape, match=r"permute_dims \(turned\).*state those of the operands with match_cast"):
        legalize(builder.finish())


@pytest.mark.parametrize("attrs", [{"stride": 1 << 70}, {"begin": -(1 << 63) - 1}, {"end": 1 << 63, "stride": 2}])
def test_attributes_have_64_bits(attrs: dict[str, int], deduced) -> None:
    """The interpreter computes with integers of any size, compiled code with 64 bits."""
    with pytest.raises(AnnotationError, match="expected an integer of 64 bits"):
        deduced(SLICE, tensor((N, 3), F32), axis=0, **attrs)
