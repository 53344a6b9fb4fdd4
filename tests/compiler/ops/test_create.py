"""Filled tensors, shapes as values, padding, triangles, random numbers, and sizes that depend on data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.text.parser import parse
from compiler.ir.types import ScalarType, ShapeType, TensorType, tensor
from compiler.ops.create import ARANGE, FULL, PAD, SHAPE_OF, SHAPE_TO_TENSOR, TENSOR_TO_SHAPE, TRIL
from compiler.ops.dynamic import NONZERO, UNIQUE
from compiler.ops.elementwise import ADD
from compiler.ops.random import UNIFORM
from compiler.passes.legalize import legalize
from runtime.errors import ArgumentMismatch
from runtime.session import Session

F32, I64 = DType.F32, DType.I64
N = DimVar("n")
SHAPE = ShapeType((Dim.of(N), Dim.of(4)))


def test_full(run, deduced):
    np.testing.assert_array_equal(run(FULL, (2, 3), 1.5, dtype="f32"), np.full((2, 3), 1.5, np.float32))
    assert run(FULL, (0, 3), 7, dtype="u8").shape == (0, 3)
    assert run(FULL, (), True, dtype="bool") == np.array(True)
    assert deduced(FULL, SHAPE, ScalarType(F32), dtype="bf16") == TensorType(SHAPE.dims, DType.BF16)
    with pytest.raises(AnnotationError, match="expected a scalar"):
        deduced(FULL, SHAPE, tensor((), F32), dtype="f32")
    with pytest.raises(AnnotationError, match="attribute dtype is 'f99', expected one of f32"):
        deduced(FULL, SHAPE, ScalarType(F32), dtype="f99")


@pytest.mark.parametrize(
    ("value", "dtype", "element"),
    [(2.75, "i32", 2), (math.nan, "i32", 0), (1e10, "i32", 2**31 - 1), (-math.inf, "u8", 0), (ScalarValue(300, DType.I32), "i8", 44)],
)
def test_a_number_of_another_type_is_cast(run, value, dtype, element):
    """As the elements of a tensor are: integers wrap, and floats that are too large become the largest number."""
    np.testing.assert_array_equal(run(FULL, (2,), value, dtype=dtype, compiled=True), np.array([element] * 2, DType(dtype).numpy))


@pytest.mark.parametrize(("given", "value", "dtype", "element"), [("f32", 2.75, "i32", 2), ("f16", -1e9, "u8", 0), ("i32", 300, "i8", 44)])
def test_a_parameter_of_another_type_is_cast(compute, given, value, dtype, element):
    program = f'func main(s: scalar[{given}]) -> object {{ y = full(shape[4], s, dtype="{dtype}") return y }}'
    np.testing.assert_array_equal(compute(program, value), np.array([element] * 4, DType(dtype).numpy))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_bool_is_padded_with_truth_values(compute, value):
    program = f"func main(x: bool[n]) -> object {{ y = pad(x, before=[1], after=[0], value={value}) return y }}"
    np.testing.assert_array_equal(compute(program, np.array([True, False])), [bool(value), True, False])


def test_arange(run, deduced):
    np.testing.assert_array_equal(run(ARANGE, stop=5), np.arange(5))
    np.testing.assert_array_equal(run(ARANGE, start=2, stop=9, step=3, dtype="f32"), np.arange(2, 9, 3, dtype=np.float32))
    assert run(ARANGE, start=4, stop=2).shape == (0,)
    assert deduced(ARANGE, stop=N * 2, step=2) == tensor((N,), I64)
    with pytest.raises(AnnotationError, match="attribute step is 0"):
        deduced(ARANGE, stop=4, step=0)


def test_a_tensor_of_numbers_becomes_a_shape(meaning, deduced, compute):
    assert meaning(TENSOR_TO_SHAPE, np.array([2, 0, 3])) == (2, 0, 3)
    assert deduced(TENSOR_TO_SHAPE, tensor((3,), I64)) == ShapeType(None, 3)
    assert deduced(TENSOR_TO_SHAPE, tensor((N,), I64)) == ShapeType(None)
    with pytest.raises(AnnotationError, match="x holds i32, expected i64; cast first"):
        deduced(TENSOR_TO_SHAPE, tensor((3,), DType.I32))
    program = """
    func main(x: f32[n], s: i64[2]) -> object {
      wanted = tensor_to_shape(s)
      known = match_cast wanted to shape[a, b]
      y = reshape(x, shape[a, b])
      z = exp(y)
      return z
    }
    """
    x = np.linspace(0, 1, 12, dtype=np.float32)
    for shape in ((3, 4), (12, 1)):
        assert compute(program, x, np.array(shape)).shape == shape
    session = Session(compile_module(parse(program)))
    with pytest.raises(ArgumentMismatch, match=r"expected a\*b = 10, got 12"):
        session.call("main", x, np.array([2, 5]))
    session.close()


def test_a_computed_shape_sees_what_was_computed(compute):
    """A shape that a kernel computes is read only after the kernel has run."""
    program = """
    func main(x: f32[n], s: i64[1]) -> object {
      dataflow {
        twice = add(s, s)
        wanted = tensor_to_shape(twice)
        known = match_cast wanted to shape[m]
        y = full(shape[m], 2.0, dtype="f32")
      }
      return y
    }
    """
    assert compute(program, np.zeros(3, np.float32), np.array([4])).tolist() == [2.0] * 8


def test_shapes_as_values(meaning, run, deduced):
    assert meaning(SHAPE_OF, np.zeros((2, 0, 3))) == (2, 0, 3)
    assert deduced(SHAPE_OF, tensor((N, 4), F32)) == SHAPE
    assert deduced(SHAPE_OF, TensorType(None, F32, 2)) == ShapeType(None, 2)
    np.testing.assert_array_equal(run(SHAPE_TO_TENSOR, (3, 0, 5)), [3, 0, 5])
    assert run(SHAPE_TO_TENSOR, ()).shape == (0,)
    assert deduced(SHAPE_TO_TENSOR, SHAPE) == tensor((2,), I64)


def test_pad(run, deduced):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for before, after in (((1, 0), (0, 2)), ((0, 0), (0, 0)), ((2, 1), (1, 3))):
        for shapes in (None, "n m"):
            found = run(PAD, x, before=before, after=after, value=-1.0, shapes=shapes)
            np.testing.assert_array_equal(found, np.pad(x, tuple(zip(before, after, strict=True)), constant_values=-1))
    np.testing.assert_array_equal(run(PAD, x[:0], before=(1, 0), after=(1, 0)), np.zeros((2, 3)))
    np.testing.assert_array_equal(run(PAD, np.array(x[0, 0]), before=(), after=()), x[0, 0])
    assert deduced(PAD, tensor((N, 3), F32), before=(0, 1), after=(N, 1)) == tensor((N * 2, 5), F32)
    with pytest.raises(AnnotationError, match="have 1 and 2 widths, expected 2 of each"):
        deduced(PAD, tensor((2, 3), F32), before=(1,), after=(0, 0))
    with pytest.raises(AnnotationError, match="before is -1"):
        deduced(PAD, tensor((2,), F32), before=(-1,), after=(0,))
    for dtype, value in ((DType.U8, 256), (DType.U8, -1), (DType.I32, 0.5), (DType.I8, float("nan")), (DType.I64, 1e300), (DType.BOOL, 2)):
        with pytest.raises(AnnotationError, match=f"expected a number of type {dtype}"):
            deduced(PAD, tensor((2,), dtype), before=(1,), after=(0,), value=value)


@pytest.mark.parametrize("k", [-2, 0, 1])
def test_triangles(run, rng, k):
    x = rng.integers(1, 9, (2, 3, 5)).astype(np.int32)
    np.testing.assert_array_equal(run(TRIL, x, k=k, shapes="b n m"), np.tril(x, k))


@pytest.mark.parametrize("shapes", [None, "b n m"])
def test_diagonals_outside_of_the_matrix(run, shapes):
    x = np.ones((2, 3, 5), np.int32)
    for k, kept in ((2**63 - 1, 30), (5, 30), (-3, 0), (-(2**63), 0)):
        assert run(TRIL, x, k=k, shapes=shapes, compiled=True).sum() == kept


def test_uniform(run, deduced):
    x = run(UNIFORM, (50, 40), 1234)
    assert 0 <= x.min() < 0.01 and 0.99 < x.max() < 1
    assert abs(x.mean() - 0.5) < 0.02
    np.testing.assert_array_equal(run(UNIFORM, (2000,), 1234).reshape(50, 40), x)
    assert not np.array_equal(run(UNIFORM, (2000,), -5), x.reshape(-1))
    assert run(UNIFORM, (0,), 1).shape == (0,)
    with pytest.raises(AnnotationError, match="seed is scalar"):
        deduced(UNIFORM, SHAPE, ScalarType(F32))


def test_uniform_takes_its_seed_at_run_time():
    n, seed = DimVar("n"), Var("seed", ScalarType(I64))
    builder = Builder()
    with builder.function("main", [Var("size", ShapeType((Dim.of(n),))), seed]):
        builder.returns(builder.call(UNIFORM, ShapeValue((Dim.of(n),)), seed))
    module = builder.finish()
    for number in (7, 2**40 + 7):
        expected = Interpreter(module).call("main", (5,), number)
        np.testing.assert_array_equal(Interpreter(legalize(module)).call("main", (5,), number), expected)


def test_data_dependent_sizes(run, deduced):
    x = np.array([[3, 0, 1], [3, 1, 0]], np.int32)
    np.testing.assert_array_equal(run(UNIQUE, x, shapes="n m"), [0, 1, 3])
    np.testing.assert_array_equal(run(NONZERO, x, shapes="n m"), np.array(np.nonzero(x)))
    assert deduced(UNIQUE, tensor((N,), F32)) == TensorType(None, F32, 1)
    assert deduced(NONZERO, tensor((N,), F32)) == TensorType(None, I64, 2)


def test_a_match_cast_names_a_size_that_depends_on_data():
    x, m = Var("x", tensor((N,), DType.I32)), DimVar("m")
    builder = Builder()
    with builder.function("main", [x]):
        found = builder.match_cast(builder.call(UNIQUE, x), tensor((m,), DType.I32))
        builder.returns(builder.call(ADD, found, ScalarValue(Dim.of(1))))
    for module in (builder.finish(), legalize(builder.finish())):
        np.testing.assert_array_equal(Interpreter(module).call("main", np.array([4, 2, 4], np.int32)), [3, 5])
