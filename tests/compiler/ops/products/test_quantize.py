"""Quantising floats to integers, and dequantising the integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.numbers import Kind
from compiler.ir.types import TensorType, TupleType, tensor
from compiler.ops.products.quantize import DEQUANTIZE, QUANTIZE

F32, F16, I8, U8 = DType.F32, DType.F16, DType.I8, DType.U8
N = DimVar("n")


@pytest.mark.parametrize("bits, group, shapes", [(8, 0, "n k"), (8, 4, "n 8"), (8, 4, None), (4, 0, "n 8"), (4, 4, "n 8"), (4, 4, None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_there_and_back_is_within_half_a_step(run, rng, bits, group, symmetric, shapes):
    x = (rng.standard_normal((5, 8)) + 0.5).astype(np.float32)
    x[2, :4] = 0
    parts = run(QUANTIZE, x, bits=bits, group=group, symmetric=symmetric, shapes=shapes)
    assert parts[0].dtype == (np.int8 if bits == 8 else np.uint8)
    assert parts[0].shape == (5, bits)
    back = run(DEQUANTIZE, *parts, bits=bits, group=group)
    steps = np.repeat(parts[1], group or 8, -1)
    assert (np.abs(back - x) <= steps * 0.5001 + 1e-7).all()
    np.testing.assert_array_equal(back[2, : group or 0], 0)


def test_a_known_packing(run):
    q = np.array([[0x1F, 0x80]], np.uint8)  # the lower half of a byte is the first number, so the numbers are 15, 1, 0, 8
    scale = np.array([[2.0]], np.float16)
    np.testing.assert_array_equal(run(DEQUANTIZE, q, scale, bits=4, dtype="f32"), [[14, -14, -16, 0]])
    np.testing.assert_array_equal(run(DEQUANTIZE, q, scale, np.array([[1]], np.uint8), bits=4, shapes="n k, n 1, n 1"), [[28, 0, -2, 14]])


def test_a_shift_is_subtracted_behind_the_scale(run, rng, deduced):
    q, scale = rng.integers(0, 256, (5, 16)).astype(np.uint8), rng.random((5, 2)).astype(np.float32)
    shift = rng.random((5, 2)).astype(np.float32)
    numbers = np.stack([q & 15, q >> 4], -1).reshape(5, 32).astype(np.float32)
    found = run(DEQUANTIZE, q, scale, shift, bits=4, group=16, shifted=True, shapes="n 16, n 2, n 2")
    np.testing.assert_array_equal(found, np.repeat(scale, 16, -1) * numbers - np.repeat(shift, 16, -1))
    with pytest.raises(AnnotationError, match="attribute shifted is true, expected a shift"):
        deduced(DEQUANTIZE, tensor((N, 16), U8), tensor((N, 2), F32), bits=4, group=16, shifted=True)


def test_floats_of_four_bits_are_doubled_before_the_scale(run, deduced):
    q = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)  # all patterns of bits, in order
    scale, doubled = np.array([[0.5, 2.0]], np.float32), np.array([0, 1, 2, 3, 4, 6, 8, 12])
    found = run(DEQUANTIZE, q, scale, bits=4, group=8, kind="e2m1", shapes="n 8, n 2")
    np.testing.assert_array_equal(found, [[*doubled * 0.5, *doubled * -2.0]])
    for kind in ("e2m1", "iq4"):
        with pytest.raises(AnnotationError, match=f"attribute kind is {kind}, expected 4 bits and no offset"):
            deduced(DEQUANTIZE, tensor((N, 16), I8), tensor((N, 1), F32), kind=kind)
    with pytest.raises(
        AnnotationError,
        match=f"attribute kind is 'e3m0', expected one of {', '.join(Kind)}",
    ):
        deduced(DEQUANTIZE, tensor((N, 16), U8), tensor((N, 1), F32), bits=4, kind="e3m0")


def test_indices_of_the_table_of_iq4_are_looked_up(run):
    q = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)  # all patterns of bits, in order
    found = run(DEQUANTIZE, q, np.array([[0.5, 2.0]], np.float32), bits=4, group=8, kind="iq4", shapes="n 8, n 2")
    np.testing.assert_array_equal(found, [[-63.5, -52, -41.5, -32.5, -24.5, -17.5, -11, -5, 2, 26, 50, 76, 106, 138, 178, 226]])


@pytest.mark.parametrize(
    ("kind", "magnitudes"),
    [("iq3_s", range(1, 16, 2)), ("iq3_xxs", (4, 12, 20, 28, 36, 44, 52, 62)), ("iq2", (8, 25, 43, 0, 0, 0, 0, 0))],
)
def test_codes_of_grids_have_a_magnitude_and_a_sign(run, kind, magnitudes):
    q = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)  # all patterns of bits, in order
    found = run(DEQUANTIZE, q, np.array([[0.5, 2.0]], np.float32), bits=4, group=8, kind=kind, shapes="n 8, n 2")
    np.testing.assert_array_equal(found, [[*np.array(magnitudes) * 0.5, *np.array(magnitudes) * -2.0]])


def test_floats_of_eight_bits(run, rng, deduced):
    q = np.delete(np.arange(256, dtype=np.uint8), [0x7E, 0x7F, 0xFE, 0xFF]).reshape(2, 126).view(ml_dtypes.float8_e4m3fn)
    scale = rng.random((2, 9)).astype(ml_dtypes.bfloat16)
    found = run(DEQUANTIZE, q, scale, group=14, kind="e4m3", shapes="n 126, n 9")
    np.testing.assert_array_equal(found, q.astype(np.float32) * np.repeat(scale.astype(np.float32), 14, -1))
    with pytest.raises(AnnotationError, match="attribute kind is e4m3, expected 8 bits and no offset"):
        deduced(DEQUANTIZE, tensor((N, 16), U8), tensor((N, 1), F32), bits=4, kind="e4m3")
    with pytest.raises(AnnotationError, match="q holds i8, expected e4m3 for 8 bits"):
        deduced(DEQUANTIZE, tensor((N, 16), I8), tensor((N, 1), F32), kind="e4m3")


def test_dequantizing_to_small_floats(run, rng):
    q = rng.integers(-128, 128, (3, 6)).astype(np.int8)
    scale = rng.random((3, 1)).astype(np.float32)
    found = run(DEQUANTIZE, q, scale, dtype="bf16", shapes="n k, n 1")
    np.testing.assert_array_equal(found, (q * scale).astype(ml_dtypes.bfloat16))


def test_deduction(deduced):
    k = DimVar("k", multiple_of=32)
    assert deduced(QUANTIZE, tensor((N, k), F32), bits=4, group=32, dtype="f16") == TupleType(
        (tensor((N, Dim.of(k) // 2), U8), tensor((N, Dim.of(k) // 32), F16))
    )
    assert deduced(DEQUANTIZE, tensor((N, 16), U8), tensor((N, 1), F16), bits=4, group=32) == tensor((N, 32), F32)
    assert deduced(DEQUANTIZE, TensorType(None, I8, 2), tensor((N, 1), F16)) == TensorType(None, F32, 2)
    with pytest.raises(AnnotationError, match="last dimension is 6, expected a multiple of the group size, 4"):
        deduced(QUANTIZE, tensor((2, 6), F32), group=4)
    with pytest.raises(AnnotationError, match="last dimension is 5, expected an even number"):
        deduced(QUANTIZE, tensor((2, 5), F32), bits=4)
    with pytest.raises(AnnotationError, match="attribute bits is 3, expected 8 or 4"):
        deduced(QUANTIZE, tensor((2, 6), F32), bits=3)
    with pytest.raises(AnnotationError, match="q holds i8, expected u8 for 4 bits"):
        deduced(DEQUANTIZE, tensor((2, 6), I8), tensor((2, 1), F32), bits=4)
    with pytest.raises(AnnotationError, match="dimension 1 of scale is 3, expected 2"):
        deduced(DEQUANTIZE, tensor((2, 8), I8), tensor((2, 3), F32), group=4)
