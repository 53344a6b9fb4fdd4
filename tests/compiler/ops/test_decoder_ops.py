"""Matrix products, norms and embeddings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.types import ObjectType, ScalarType, TensorType, TupleType, tensor
from compiler.ops.broadcast import broadcast_shapes
from compiler.ops.embedding import EMBEDDING, ROPE, ROPE_ANGLES
from compiler.ops.normalize import LAYER_NORM, LOG_SOFTMAX, RMS_NORM, SOFTMAX
from compiler.ops.products.matmul import LINEAR, MATMUL
from compiler.passes.legalize import legalize

F32, BF16, I32 = DType.F32, DType.BF16, DType.I32
N, M, K = DimVar("n"), DimVar("m"), DimVar("k")
bf16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def normal(rng):
    return lambda *shape, dtype=np.float32: rng.standard_normal(shape).astype(dtype)


# --- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [None, "n k, m k, m", "n 5, m k, j"])
@pytest.mark.parametrize("types", [(np.float32, np.float32), (np.float32, bf16), (bf16, bf16), (np.float16, np.float32)], ids=str)
def test_linear(run, normal, shapes, types):
    x, w, bias = normal(3, 5, dtype=types[0]), normal(4, 5, dtype=types[1]), normal(4, dtype=types[1])
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    found = run(LINEAR, x, w, bias, shapes=shapes)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=1e-2 if x.dtype.itemsize == 2 else 1e-5, atol=1e-2)
    wide = run(LINEAR, x, w, out_dtype="f32")
    np.testing.assert_allclose(wide, exact - bias.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_linear_at_the_edges(run, normal):
    assert run(LINEAR, normal(0, 5), normal(4, 5), shapes="n k, m k").shape == (0, 4)
    np.testing.assert_array_equal(run(LINEAR, normal(2, 0), normal(4, 0), shapes="n k, m k"), np.zeros((2, 4)))
    assert run(LINEAR, normal(5), normal(1, 5)).shape == (1,)
    assert run(LINEAR, normal(2, 1, 3, 5), normal(4, 5), shapes="a b c k, m k").shape == (2, 1, 3, 4)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(run, normal, transpose_a, transpose_b):
    a, b = normal(2, 1, 3, 5), normal(4, 5, 6)
    expected = a @ b
    left, right = (np.swapaxes(a, -1, -2) if transpose_a else a), (np.swapaxes(b, -1, -2) if transpose_b else b)
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    for shapes in (None, "a 1 i j, b k l", "a 1 i j, 4 k l"):
        found = run(MATMUL, left, right, transpose_a=transpose_a, transpose_b=transpose_b, shapes=shapes)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_matmul_of_integers(run, rng):
    a, b = (rng.integers(-128, 128, (4, 4)).astype(np.int8) for _ in range(2))
    np.testing.assert_array_equal(run(MATMUL, a, b, out_dtype="i32", shapes="n k, k m"), a.astype(np.int32) @ b.astype(np.int32))


def test_products_deduce_and_refuse(deduced):
    x, w = tensor((N, K), F32), tensor((8, K), BF16)
    assert deduced(LINEAR, x, w) == tensor((N, 8), F32)
    assert deduced(LINEAR, x, w, out_dtype="bf16") == tensor((N, 8), BF16)
    assert deduced(LINEAR, TensorType(None, F32, 3), w) == TensorType(None, F32, 3)
    assert deduced(LINEAR, ObjectType(), ObjectType()) == TensorType(None, None)
    assert deduced(MATMUL, tensor((N, 2, 3), F32), tensor((3, M), F32)) == tensor((N, 2, M), F32)
    (batch,) = broadcast_shapes((Dim.of(N),), (Dim.of(M),))
    assert deduced(MATMUL, tensor((N, 2, 3), F32), tensor((M, 3, 2), F32)) == tensor((batch, 2, 2), F32)
    assert deduced(MATMUL, TensorType(None, F32, 2), tensor((M, 3, 2), F32)) == TensorType(None, F32, 3)
    refused = [
        ("last dimension of x is 3, expected 4", LINEAR, (tensor((N, 3), F32), tensor((8, 4), F32))),
        ("weight has rank 1, expected 2: \\[out, in\\]", LINEAR, (x, tensor((K,), F32))),
        ("x has rank 0", LINEAR, (tensor((), F32), w)),
        ("length of bias is 4, expected 8", LINEAR, (x, w, tensor((4,), F32))),
        ("x holds i32, expected floats", LINEAR, (tensor((N, K), I32), w)),
        ("x is scalar", LINEAR, (ScalarType(F32), w)),
        ("contracted dimension of b is 4, expected 3", MATMUL, (tensor((2, 3), F32), tensor((4, 2), F32))),
        ("a has rank 1, expected at least 2", MATMUL, (tensor((3,), F32), tensor((3, 2), F32))),
        ("extents 2 and 3 do not broadcast", MATMUL, (tensor((2, 1, 1), F32), tensor((3, 1, 1), F32))),
        ("f32 and i32, expected floats or integers", MATMUL, (tensor((1, 1), F32), tensor((1, 1), I32))),
    ]
    for message, op, types in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types)


def test_a_contracted_dimension_is_checked_at_run_time(normal):
    x, w = Var("x", tensor((N, K), F32)), Var("w", tensor((4, M), F32))
    builder = Builder()
    with builder.function("main", [x, w]):
        builder.returns(builder.call(LINEAR, x, w))
    legal = legalize(builder.finish())
    with pytest.raises(MismatchError, match="dimension 1 is 6, expected k = 5"):
        Interpreter(legal).call("main", normal(2, 5), normal(4, 6))


# --- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, bf16], ids=str)
@pytest.mark.parametrize("shape, shapes", [((3, 5), None), ((3, 5), "n k"), ((2, 1, 7), "a b k"), ((0, 4), "n k"), ((4,), "k")])
def test_softmax(run, normal, dtype, shape, shapes):
    x = normal(*shape, dtype=dtype) * 4
    wide = x.astype(np.float64)
    expected = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    tolerance = 1e-2 if dtype is bf16 else 2e-6
    np.testing.assert_allclose(run(SOFTMAX, x, shapes=shapes).astype(np.float64), expected, rtol=tolerance)
    np.testing.assert_allclose(run(LOG_SOFTMAX, x, shapes=shapes).astype(np.float64), np.log(expected), rtol=tolerance, atol=tolerance)


def test_softmax_of_large_numbers(run):
    x = np.array([[1e30, 1e30, -1e30], [-np.inf, 0, -np.inf]], np.float32)
    np.testing.assert_array_equal(run(SOFTMAX, x), [[0.5, 0.5, 0], [0, 1, 0]])


@pytest.mark.parametrize("dtype", [np.float32, bf16], ids=str)
@pytest.mark.parametrize("shapes", [None, "n k, k, k", "n k, l, m"])
def test_norms(run, normal, dtype, shapes):
    x, w, b = normal(3, 5, dtype=dtype), normal(5, dtype=dtype), normal(5, dtype=dtype)
    wide, w64, b64 = (v.astype(np.float64) for v in (x, w, b))
    tolerance = 1e-2 if dtype is bf16 else 1e-5
    two = shapes and ",".join(shapes.split(",")[:2])
    for offset in (0.0, 1.0):
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (w64 + offset)
        found = run(RMS_NORM, x, w, eps=1e-6, weight_offset=offset, shapes=two)
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * w64
    np.testing.assert_allclose(run(LAYER_NORM, x, w, eps=1e-5, shapes=two).astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    found = run(LAYER_NORM, x, w, b, eps=1e-5, shapes=shapes)
    np.testing.assert_allclose(found.astype(np.float64), expected + b64, rtol=tolerance, atol=2 * tolerance)


def test_norms_of_rows_without_elements(run, normal):
    for op in (RMS_NORM, LAYER_NORM):
        assert run(op, normal(2, 0), normal(0), eps=1e-6, shapes="n k, k").shape == (2, 0)


def test_norms_refuse(deduced):
    x = tensor((N, 8), F32)
    assert deduced(RMS_NORM, TensorType(None, F32, 2), tensor((8,), F32), eps=1e-6) == TensorType(None, F32, 2)
    refused = [
        ("length of operand 1 is 4, expected 8", RMS_NORM, (x, tensor((4,), F32)), {"eps": 1e-6}),
        ("operand 1 has rank 2, expected 1", RMS_NORM, (x, x), {"eps": 1e-6}),
        ("needs the attribute eps", LAYER_NORM, (x, tensor((8,), F32)), {}),
        ("attribute eps is 'small', expected a number", RMS_NORM, (x, tensor((8,), F32)), {"eps": "small"}),
        ("x has rank 0", SOFTMAX, (tensor((), F32),), {}),
        ("x holds i32, expected floats", SOFTMAX, (tensor((3,), I32),), {}),
    ]
    for message, op, types, attrs in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types, **attrs)


# --- embeddings --------------------------------------------------------------------------------------------------------


def test_embedding_clamps_ids(run, normal):
    table = normal(10, 4, dtype=bf16)
    ids = np.array([[1, 0, 9], [12, -1, 3]], np.int32)
    np.testing.assert_array_equal(run(EMBEDDING, table, ids, shapes="v 4, a b"), table[[[1, 0, 9], [9, 0, 3]]])
    assert run(EMBEDDING, table, ids[:0], shapes="v h, a b").shape == (0, 3, 4)


def rotated(x, angles, interleaved):
    """Return the elements of x rotated by the angles. This is the reference: it treats pairs of elements as complex numbers."""
    half = angles.shape[1]
    turn = np.exp(1j * angles)[:, None, :]
    out = x.astype(np.float64).copy()
    head = out[..., : 2 * half]
    pairs = (head[..., 0::2] + 1j * head[..., 1::2]) if interleaved else (head[..., :half] + 1j * head[..., half:])
    pairs = pairs * turn
    if interleaved:
        head[..., 0::2], head[..., 1::2] = pairs.real, pairs.imag
    else:
        head[..., :half], head[..., half:] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 3, 1])
@pytest.mark.parametrize("shapes", [None, "t h 8, t p, t p", "t h d, t p, u q"])
def test_rope(run, normal, interleaved, pairs, shapes):
    angles = normal(3, pairs)
    x = normal(3, 2, 8)
    found = run(ROPE, x, np.cos(angles), np.sin(angles), interleaved=interleaved, shapes=shapes)
    np.testing.assert_allclose(found, rotated(x, angles, interleaved), rtol=1e-5, atol=1e-6)


def test_rope_angles(run):
    positions, inv_freq = np.array([0, 3, 1000], np.int32), np.array([1, 0.1], np.float32)
    cos, sin = run(ROPE_ANGLES, positions, inv_freq, scale=1.5, shapes="t, p")
    angles = positions[:, None].astype(np.float32) * inv_freq
    np.testing.assert_allclose(cos, 1.5 * np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sin, 1.5 * np.sin(angles.astype(np.float64)), atol=1e-6)


def test_embeddings_deduce_and_refuse(deduced):
    table, x = tensor((100, 8), BF16), tensor((N, 4, 8), F32)
    assert deduced(EMBEDDING, table, tensor((N, M), I32)) == tensor((N, M, 8), BF16)
    assert deduced(EMBEDDING, table, TensorType(None, I32, 1)) == TensorType(None, BF16, 2)
    angles = tensor((N, 4), F32)
    assert deduced(ROPE_ANGLES, tensor((N,), I32), tensor((4,), F32)) == TupleType((angles, angles))
    assert deduced(ROPE, x, angles, angles) == x
    refused = [
        ("ids holds f32, expected integers", EMBEDDING, (table, x)),
        ("table has rank 3, expected 2", EMBEDDING, (x, tensor((N,), I32))),
        ("twice the number of pairs is 10, expected at most 8", ROPE, (x, tensor((N, 5), F32), tensor((N, 5), F32))),
        ("number of pairs of sin is 3, expected 4", ROPE, (x, angles, tensor((N, 3), F32))),
        ("x has rank 2, expected 3", ROPE, (angles, angles, angles)),
        ("inv_freq holds bf16, expected f32", ROPE_ANGLES, (tensor((N,), I32), tensor((4,), BF16))),
    ]
    for message, op, types in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types)
