"""Rows quantised to integers: the error of quantisation, and which rows need two planes."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, TupleType, tensor
from compiler.ops.products.integer_rows import QUANTIZE_ROWS, ROW_PLANES

F32, I8, I32, BOOL = DType.F32, DType.I8, DType.I32, DType.BOOL
N = DimVar("n")
CAP = 2.0


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_quantised_rows_are_within_half_a_step(run, rng, bits, group, rows):
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    x[1:2, :32] = 0
    q, scale, total, sums = run(QUANTIZE_ROWS, x, bits=bits, group=group, sums=True, shapes="n 64", compiled=True)
    numbers = q[:, 0].astype(np.int32) if bits == 8 else q[:, 0].astype(np.int32) * 256 + q[:, 1]
    steps = np.repeat(scale, group or 64, -1)
    assert (np.abs(numbers * steps - x) <= steps * 0.5001).all()
    np.testing.assert_array_equal(total, q.astype(np.int32).reshape(rows, bits // 8, 64 // (group or 64), group or 64).sum(-1))
    np.testing.assert_array_equal(scale[1:2, :1] == 0, group == 32)
    np.testing.assert_allclose(sums, (numbers * steps).reshape(rows, -1, group or 64).sum(-1) if rows else sums, rtol=1e-5, atol=1e-5)


def test_a_plane_of_words_is_two_of_bytes(run, meaning, rng):
    x = rng.standard_normal((5, 64)).astype(np.float32)
    words, scale, total = run(QUANTIZE_ROWS, x, bits=16, group=32, dtype="i16", shapes="n 64", compiled=True)
    planes, same_scale, totals = meaning(QUANTIZE_ROWS, x, bits=16, group=32)
    np.testing.assert_array_equal(words[:, 0], planes[:, 0].astype(np.int32) * 256 + planes[:, 1])
    np.testing.assert_array_equal(scale, same_scale)
    np.testing.assert_array_equal(total[:, 0], totals[:, 0] * 256 + totals[:, 1])


def test_the_widest_numbers_of_two_planes_fit(run):
    x = np.array([[1.0, -1.0, 0.5, 0.0]], np.float32)
    q, _, _ = run(QUANTIZE_ROWS, x, bits=16, compiled=True)
    np.testing.assert_array_equal(q[0, 0].astype(int) * 256 + q[0, 1], [32639, -32639, 16320, 0])


@pytest.mark.parametrize("size", [1e-36, 1e-40])
def test_rows_too_small_to_be_told_from_nothing_are_nothing(run, size):
    q, _, total = run(QUANTIZE_ROWS, np.full((2, 32), size, np.float32), bits=16, shapes="n 32", compiled=True)
    assert not q.any() and not total.any()


# --- capped rows: 16 bits for outliers ---------------------------------------------------------------------------------


def of_planes(q):
    return q[..., 0, :].astype(np.int32) * 256 + q[..., 1, :]


@pytest.mark.parametrize("group", [0, 32])
def test_only_outliers_of_capped_rows_take_more_than_eight_bits(run, rng, group):
    x = rng.uniform(-1, 1, (5, 1024)).astype(np.float32)
    x[1:, 7], x[2:, 40] = 100, -50
    q, scale, total = run(QUANTIZE_ROWS, x, bits=16, group=group, cap=CAP, shapes="n 1024", compiled=True)
    steps = np.repeat(scale, group or 1024, -1)
    assert (np.abs(of_planes(q) * steps - x) <= steps * 0.501).all()
    mean = np.abs(x).mean(-1, keepdims=True)
    assert (steps <= np.maximum(CAP * mean / 120, np.abs(x).max(-1, keepdims=True) / 32639)).all()
    np.testing.assert_array_equal(q[:, 0] != 0, np.abs(x) > steps * 127.5)
    np.testing.assert_array_equal(np.flatnonzero(q[2, 0]), [7, 40])
    np.testing.assert_array_equal(total, q.astype(np.int32).reshape(5, 2, -1, group or 1024).sum(-1))


def test_an_outlier_does_not_hide_smaller_ones(run, rng):
    x = rng.uniform(-1, 1, (2, 1024)).astype(np.float32)
    x[1, 7] = 500
    x[:, 40] = 8
    q, scale, _ = run(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP, compiled=True)
    assert (scale * 127 < 8).all()
    np.testing.assert_array_equal(np.flatnonzero(q[0, 0]), [40])


def test_rows_without_outliers_are_those_of_eight_bits(run, meaning):
    x = np.tile(np.array([1, -1, 1, 0.5], np.float32), (3, 16))
    for cap in (1, 1e-20, 1e20):
        q, scale, _ = run(QUANTIZE_ROWS, x * np.float32(cap / 2), bits=16, group=32, cap=CAP, compiled=True)
        coarse, same_scale, _ = meaning(QUANTIZE_ROWS, x * np.float32(cap / 2), bits=8, group=32)
        np.testing.assert_array_equal(of_planes(q), coarse[:, 0])
        np.testing.assert_array_equal(scale, same_scale)


def test_words_of_capped_rows_are_their_planes(run, meaning, rng):
    x = rng.standard_cauchy((5, 64)).astype(np.float32)
    words, scale, _ = run(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP, dtype="i16", shapes="n 64", compiled=True)
    planes, same_scale, _ = meaning(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP)
    np.testing.assert_array_equal(words[:, 0], of_planes(planes))
    np.testing.assert_array_equal(scale, same_scale)


def test_the_largest_outlier_of_a_long_capped_row_fits(run):
    x = np.zeros((2, 1 << 17), np.float32)
    x[0, 0], x[0, 1:] = -1, 1e-4
    q, scale, _ = run(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP, compiled=True)
    assert of_planes(q)[0, 0] == -32639
    np.testing.assert_allclose((of_planes(q)[0, 1:] * np.repeat(scale, 32, -1)[0, 1:]), 1e-4, atol=scale[0, 0])
    assert not q[1].any()


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_stays_in_its_capped_row(meaning, rng, number):
    x = rng.standard_cauchy((3, 64)).astype(np.float32)
    before = meaning(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP)
    x[1, 3] = number
    after = meaning(QUANTIZE_ROWS, x, bits=16, group=32, cap=CAP)
    assert not np.isfinite(after[1][1]).any()
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])


def test_deduction(deduced):
    assert deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=16, group=32) == TupleType(
        (tensor((N, 2, 64), I8), tensor((N, 2), F32), tensor((N, 2, 2), I32))
    )
    assert deduced(QUANTIZE_ROWS, tensor((N, 64), F32), group=32, sums=True).fields[3] == tensor((N, 2), F32)
    assert deduced(QUANTIZE_ROWS, TensorType(None, F32, 2)) == TupleType(
        (TensorType(None, I8, 3), TensorType(None, F32, 2), TensorType(None, I32, 3))
    )
    one = tensor((N, 1), F32)
    assert deduced(ROW_PLANES, tensor((N, 64), F32)) == TupleType((tensor((N, 2, 64), I8), one, tensor((N, Dim.of(1)), BOOL)))
    assert deduced(ROW_PLANES, TensorType(None, F32, 2)) == TupleType(
        (TensorType(None, I8, 3), TensorType(None, F32, 2), TensorType(None, BOOL, 2))
    )
    with pytest.raises(AnnotationError, match="attribute bits is 12, expected 8 or 16"):
        deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=12)
    with pytest.raises(AnnotationError, match="last dimension is 6, expected a multiple of the group size, 4"):
        deduced(QUANTIZE_ROWS, tensor((N, 6), F32), group=4)
    with pytest.raises(AnnotationError, match="attribute bits is 8, expected 16 of rows with a cap"):
        deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=8, cap=CAP)
    with pytest.raises(AnnotationError, match=r"attribute cap is -1.0, expected at least 0 and at most 1e\+06"):
        deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=16, cap=-1.0)
    with pytest.raises(AnnotationError, match="attribute cap is nan"):
        deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=16, cap=float("nan"))
    with pytest.raises(AnnotationError, match="attribute dtype is i32, expected i8 or i16"):
        deduced(QUANTIZE_ROWS, tensor((N, 64), F32), bits=8, dtype="i32")


# --- row_planes: which rows need two planes ----------------------------------------------------------------------------


def outlying(rng, crest, length=1024):
    """Return a row whose element 7 is an outlier: `crest` times the root mean square of the row."""
    row = rng.standard_normal(length).astype(np.float32)
    row[7] = 0
    row[7] = np.sqrt(np.square(row).sum() * crest**2 / (length - crest**2))
    return row


def test_a_row_is_fine_where_one_number_stands_far_above_the_others(run, rng):
    crests = [5, 11, 12, 12.5, 12.8, 20, 31]
    x = np.stack([outlying(rng, crest) for crest in crests])
    planes, scale, two_planes = run(ROW_PLANES, x, shapes="n 1024", compiled=True)
    np.testing.assert_array_equal(two_planes[:, 0], np.array(crests) ** 2 > 160)
    np.testing.assert_array_equal(planes[:, 1].any(-1), two_planes[:, 0])
    numbers = planes[:, 0].astype(np.int32) * 256 + planes[:, 1]
    np.testing.assert_array_equal(np.abs(numbers).max(-1), 127 * 256)
    assert (np.abs(numbers * scale - x) <= scale * np.where(two_planes, 1.01, 128.01)).all()


def test_coarse_rows_are_those_of_eight_bits(run, meaning, rng):
    x = rng.standard_normal((5, 96)).astype(np.float32)
    planes, scale, two_planes = run(ROW_PLANES, x, shapes="n 96", compiled=True)
    q, same_scale, _ = meaning(QUANTIZE_ROWS, x, bits=8)
    assert not two_planes.any() and not planes[:, 1].any()
    np.testing.assert_array_equal(planes[:, :1], q)
    np.testing.assert_array_equal(scale * 256, same_scale)


@pytest.mark.parametrize("size", [0, 1e-36, 1e-30, 1e35])
def test_sizes_do_not_make_a_row_fine_or_coarse(run, rng, size):
    x = np.stack([outlying(rng, crest) for crest in (5, 20)]) * np.float32(size / 10)
    planes, _, two_planes = run(ROW_PLANES, x, shapes="n 1024", compiled=True)
    np.testing.assert_array_equal(two_planes[:, 0], [False, size > 1e-31])
    assert planes.any() == (size > 1e-31)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_stays_in_its_row(run, meaning, rng, number):
    x = np.stack([outlying(rng, crest) for crest in (20, 20, 5)])
    before = meaning(ROW_PLANES, x)
    x[1, 3] = number
    _, _, two_planes = after = run(ROW_PLANES, x, shapes="n 1024")
    np.testing.assert_array_equal(two_planes[:, 0], [True, False, False])
    assert not np.isfinite(after[1][1])
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])
