"""Elementwise operators: arithmetic, comparison, logic, functions, where and cast."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.types import ObjectType, ScalarType, ShapeType, TensorType, tensor
from compiler.ops import elementwise as e
from compiler.ops.broadcast import broadcast_shapes
from compiler.ops.tables import INTERPRET
from compiler.passes.legalize import legalize

F32, I32, BOOL = DType.F32, DType.I32, DType.BOOL
N, M = DimVar("n"), DimVar("m")
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)

ARITHMETIC = {
    e.ADD: np.add,
    e.SUBTRACT: np.subtract,
    e.MULTIPLY: np.multiply,
    e.MINIMUM: np.minimum,
    e.MAXIMUM: np.maximum,
}
COMPARISONS = {
    e.LESS: np.less,
    e.LESS_EQUAL: np.less_equal,
    e.GREATER: np.greater,
    e.GREATER_EQUAL: np.greater_equal,
    e.EQUAL: np.equal,
    e.NOT_EQUAL: np.not_equal,
}
erf = np.vectorize(math.erf, otypes=[np.float64])
FUNCTIONS = {
    e.NEGATIVE: np.negative,
    e.ABS: np.abs,
    e.EXP: np.exp,
    e.TANH: np.tanh,
    e.ERF: erf,
    e.SIN: np.sin,
    e.COS: np.cos,
    e.FLOOR: np.floor,
    e.ROUND: np.rint,
    e.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    e.SILU: lambda x: x / (1 + np.exp(-x)),
    e.RELU: lambda x: np.maximum(x, 0),
    e.GELU: lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    e.GELU_TANH: lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}
POSITIVE = {e.LOG: np.log, e.SQRT: np.sqrt, e.RSQRT: lambda x: 1 / np.sqrt(x)}


def name(x: object) -> str:
    return getattr(x, "name", str(x))


@pytest.mark.parametrize("op", ARITHMETIC | COMPARISONS, ids=name)
@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int32), np.dtype(np.int8), np.dtype(np.uint8)], ids=str)
def test_two_operands(run, rng, op, dtype):
    a, b = (rng.integers(0, 9, shape).astype(dtype) for shape in ((3, 5), (5,)))
    expected = (ARITHMETIC | COMPARISONS)[op](a, b)
    for shapes in (None, "n k, k", "n 5, k"):
        np.testing.assert_array_equal(run(op, a, b, shapes=shapes), expected)
    assert run(op, a[:0], b, shapes="n k, k").shape == (0, 5)


@pytest.mark.parametrize("op", FUNCTIONS | POSITIVE, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions(run, rng, op, dtype):
    x = rng.standard_normal((3, 7)).astype(dtype)
    x = np.abs(x) + x.dtype.type(0.1) if op in POSITIVE else x
    expected = (FUNCTIONS | POSITIVE)[op](x.astype(np.float64))
    found = run(op, x, shapes="n k").astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=float(ml_dtypes.finfo(dtype).eps) * 4, atol=1e-6)


@pytest.mark.parametrize("op", [e.SIGMOID, e.SILU, e.GELU, e.GELU_TANH, e.TANH, e.ERF, e.EXP], ids=name)
def test_functions_at_the_ends(run, op):
    x = np.array([-200.0, -90.0, 0.0, 90.0, 200.0, np.inf], np.float32)
    found = run(op, x)
    assert not np.isnan(found[:-1]).any()


def test_division_and_powers(run, rng):
    a, b = (rng.random((2, 3)).astype(np.float32) + 0.5 for _ in range(2))
    np.testing.assert_array_equal(run(e.DIVIDE, a, b, shapes="n k, n k"), a / b)
    np.testing.assert_allclose(run(e.POWER, a, b), a.astype(np.float64) ** b, rtol=1e-6)
    i, j = np.array([-7, 7, -7, 7, 0], np.int32), np.array([2, -2, -2, 2, 3], np.int32)
    np.testing.assert_array_equal(run(e.FLOOR_DIVIDE, i, j), i // j)
    np.testing.assert_array_equal(run(e.MODULO, i, j), i % j)
    np.testing.assert_array_equal(run(e.FLOOR_DIVIDE, i, j * 0), 0 * i)


def test_logic_is_bitwise_on_integers(run, rng):
    for dtype in (np.bool_, np.uint8, np.int32):
        a, b = (rng.integers(0, 2 if dtype is np.bool_ else 100, 20).astype(dtype) for _ in range(2))
        np.testing.assert_array_equal(run(e.LOGICAL_AND, a, b), a & b)
        np.testing.assert_array_equal(run(e.LOGICAL_OR, a, b), a | b)
        np.testing.assert_array_equal(run(e.LOGICAL_XOR, a, b), a ^ b)
        np.testing.assert_array_equal(run(e.LOGICAL_NOT, a), ~a)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scalars_take_the_tensors_type(run, rng, dtype):
    x = rng.standard_normal(6).astype(dtype)
    third = np.asarray(1 / 3).astype(dtype)  # a scalar is rounded to the tensor's type before use
    np.testing.assert_array_equal(run(e.MULTIPLY, x, 1 / 3, shapes="n"), (x.astype(np.float32) * third.astype(np.float32)).astype(dtype))
    np.testing.assert_array_equal(run(e.SUBTRACT, 2, x), (2 - x.astype(np.float32)).astype(dtype))
    np.testing.assert_array_equal(run(e.CLIP, x, -0.5, 1), np.clip(x, dtype.type(-0.5), dtype.type(1)))


def test_a_scalar_of_the_program_may_be_a_dimension():
    x = Var("x", tensor((N,), F32))
    builder = Builder()
    with builder.function("main", [x]):
        builder.returns(builder.call(e.DIVIDE, x, ScalarValue(N * 2)))
    for module in (builder.finish(), legalize(builder.finish())):
        np.testing.assert_array_equal(Interpreter(module).call("main", np.array([6, 12, 18], np.float32)), [1, 2, 3])


def test_a_scalar_of_f16_is_rounded_once(compute):
    """The numbers lie around the middle between two numbers of f16, so near it that an f32 would lie in the middle."""
    program = "func main(x: f16[n], s: scalar[f16]) -> object { y = multiply(x, s) return y }"
    middle, near, next_ = 1 + 2.0**-11, 2.0**-40, 1 + 2.0**-10
    for number, rounded in [(middle + near, next_), (-middle - near, -next_), (middle - near, 1.0), (middle, 1.0)]:
        np.testing.assert_array_equal(compute(program, np.ones(2, np.float16), number), np.float16([rounded] * 2))
    for number in (math.inf, -math.inf, 0.0, -0.0, 1e300, 65519.999, 65520.0, 1e-40, 5e-324, math.nan):
        result = compute(program, np.ones(2, np.float16), number)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(result, np.float16([number] * 2))


@pytest.mark.parametrize("operator", ["multiply(x, {})", "where(const bool[2] [false, false], x, {})", 'full(shape[2], {}, dtype="f16")'])
def test_a_literal_of_f32_is_rounded_to_f32_and_then_to_the_elements_type(compute, operator):
    """As an operand of type f32 would be. The number lies above the middle between two numbers of f16, and the f32 in the middle."""
    program = f"func main(x: f16[2]) -> object {{ y = {operator.format(1 + 2.0**-11 + 2.0**-40)} return y }}"
    np.testing.assert_array_equal(compute(program, np.ones(2, np.float16)), np.ones(2, np.float16))


def test_integers_of_another_type_wrap(run):
    x, literal = np.array([1, 100], np.int8), ScalarValue(300, DType.I32)
    np.testing.assert_array_equal(run(e.ADD, x, literal, compiled=True), np.array([45, -112], np.int8))
    np.testing.assert_array_equal(run(e.WHERE, x > 1, x, literal, compiled=True), np.array([44, 100], np.int8))


def test_where(run, rng):
    cond, a = np.array([[True], [False]]), rng.standard_normal((2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(e.WHERE, cond, a, 0, shapes="n 1, n k"), np.where(cond, a, 0))
    np.testing.assert_array_equal(run(e.WHERE, cond, 1.5, a[0], shapes="n 1, k"), np.where(cond, np.float32(1.5), a[0]))


@pytest.mark.parametrize("source", [*FLOATS, np.dtype(np.int64), np.dtype(np.uint8), np.dtype(np.bool_)], ids=str)
@pytest.mark.parametrize("target", list(DType))
def test_cast(run, source, target):
    values = [0, 1, 2, 100, 200] if source.kind in "bui" else [0.0, -0.4, 1.5, -2.5, 300.0, -300.0]
    x = np.array(values).astype(source)
    found = run(e.CAST, x, dtype=str(target), shapes="n")
    if target.is_int and source.kind not in "bui":
        ends = np.iinfo(target.numpy)
        np.testing.assert_array_equal(found, np.clip(np.trunc(x.astype(np.float64)), ends.min, ends.max))
    else:
        np.testing.assert_array_equal(found, x.astype(target.numpy))


def test_cast_of_what_no_integer_can_hold(run):
    x = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    np.testing.assert_array_equal(run(e.CAST, x, dtype="i32"), [0, 2**31 - 1, -(2**31), 2**31 - 1])
    np.testing.assert_array_equal(run(e.CAST, x, dtype="u8"), [0, 255, 0, 255])
    np.testing.assert_array_equal(run(e.CAST, x, dtype="i64"), [0, 2**63 - 1, -(2**63), 2**63 - 1])


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=50, deadline=None)
def test_broadcasting_against_numpy(shape_a, shape_b):
    a, b = np.ones(shape_a, np.float32), np.full(shape_b, 2, np.float32)
    x, y = (Var(n, tensor(tuple(v.shape), F32)) for n, v in (("x", a), ("y", b)))
    builder = Builder()
    try:
        expected = a + b
    except ValueError:
        with pytest.raises(AnnotationError, match="do not broadcast"), builder.function("main", [x, y]):
            builder.call(e.ADD, x, y)
        return
    with builder.function("main", [x, y]):
        builder.returns(builder.call(e.ADD, x, y))
    np.testing.assert_array_equal(Interpreter(legalize(builder.finish())).call("main", a, b), expected)
    np.testing.assert_array_equal(INTERPRET["add"](a, b), expected)


def test_deduction(deduced):
    x = tensor((N, 4), F32)
    assert deduced(e.ADD, x, tensor((4,), F32)) == x
    assert deduced(e.ADD, x, tensor((M, 1, 1), F32)) == tensor((M, N, 4), F32)
    assert deduced(e.ADD, x, tensor((M, 4), F32)) == tensor((*broadcast_shapes((Dim.of(N),), (Dim.of(M),)), 4), F32)
    assert deduced(e.ADD, x, TensorType(None, None)) == TensorType(None, F32)
    assert deduced(e.ADD, x, TensorType(None, None, 3)) == TensorType(None, F32, 3)
    assert deduced(e.ADD, ObjectType(), x) == TensorType(None, F32)
    assert deduced(e.LESS, x, ScalarType(F32)) == tensor((N, 4), BOOL)
    assert deduced(e.EXP, TensorType(None, F32, 2)) == TensorType(None, F32, 2)
    assert deduced(e.CAST, x, dtype="i8") == tensor((N, 4), DType.I8)
    assert deduced(e.CAST, ObjectType(), dtype="i8") == TensorType(None, DType.I8)
    assert deduced(e.WHERE, TensorType(None, BOOL), x, x) == TensorType(None, F32)


def test_refusals(deduced):
    x, i = tensor((N, 4), F32), tensor((4,), I32)
    refused = [
        ("extents 4 and 3 do not broadcast", e.ADD, (x, tensor((3,), F32)), {}),
        ("element types f32, i32; cast them to one type", e.ADD, (x, i), {}),
        ("elements are i32, expected floats", e.EXP, (i,), {}),
        ("elements are f32, expected integers", e.MODULO, (x, x), {}),
        ("elements are bool, expected numbers", e.ADD, (tensor((1,), BOOL),) * 2, {}),
        ("elements are f32, expected bools or integers", e.LOGICAL_AND, (x, x), {}),
        (r"scalar\[f32\] does not fit into the element type i32", e.ADD, (i, ScalarType(F32)), {}),
        (
            r"scalar\[i64, 300\] does not fit into the element type u8",
            e.ADD,
            (tensor((1,), DType.U8), ScalarType(DType.I64, Dim.of(300))),
            {},
        ),
        (r"scalar\[bool\] does not fit", e.ADD, (x, ScalarType(BOOL)), {}),
        ("an operand is shape", e.ADD, (x, ShapeType(None)), {}),
        ("expected at least one tensor", e.ADD, (ScalarType(F32), ScalarType(F32)), {}),
        (r"has 1 operand, expected \(a, b\)$", e.ADD, (x,), {}),
        (r"the condition is i32\[4\], expected bool", e.WHERE, (i, x, x), {}),
        ("expected at least one tensor", e.WHERE, (tensor((4,), BOOL), ScalarType(F32), ScalarType(F32)), {}),
        ("needs the attribute dtype", e.CAST, (x,), {}),
        ("attribute dtype is 'int', expected one of", e.CAST, (x,), {"dtype": "int"}),
        ("has no attribute axis", e.EXP, (x,), {"axis": 1}),
    ]
    for message, op, types, attrs in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types, **attrs)


def test_extents_that_must_agree_are_checked_at_run_time():
    x, y = Var("x", tensor((N, 4), F32)), Var("y", tensor((M,), F32))
    builder = Builder()
    with builder.function("main", [x, y]):
        builder.returns(builder.call(e.ADD, x, y))
    legal = legalize(builder.finish())
    assert Interpreter(legal).call("main", np.zeros((2, 4), np.float32), np.ones(4, np.float32)).shape == (2, 4)
    with pytest.raises(MismatchError, match=r"operand 1 'y', dimension 0: .* is neither 1 .*: the value is 3, expected 4"):
        Interpreter(legal).call("main", np.zeros((2, 4), np.float32), np.ones(3, np.float32))
