"""Products of 4-bit weights that are widened to 8 bits: the error that widening adds, and the error of the product."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, TupleType, tensor
from compiler.ops.products.experts import EXPERT_WIDENED_LINEAR
from compiler.ops.products.integer import PANEL_INTEGERS
from compiler.ops.products.integer_rows import ROW_PLANES
from compiler.ops.products.quantize import DEQUANTIZE, QUANTIZE
from compiler.ops.products.widened import PANEL_MULTIPLIERS, WIDENED_LINEAR

F32, I8, U8, BOOL = DType.F32, DType.I8, DType.U8, DType.BOOL
N, K = DimVar("n"), 256


def test_multipliers_are_127ths_of_the_largest_scale_of_a_channel(run):
    scale = np.array([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0], [1e-3, -3e-3, 2e-3]], np.float32)
    multipliers, channel = run(PANEL_MULTIPLIERS, scale, columns=4, shapes="3 3", compiled=True)
    np.testing.assert_array_equal(multipliers[0].T, [[127, 64, -64], [0, 0, 0], [42, -127, 85], [0, 0, 0]])
    np.testing.assert_allclose(channel[0, 0], np.array([2, 0, 3e-3, 0]) * 8 / 127, rtol=1e-6)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("size", [33, 64])
def test_product_is_within_a_step_per_weight_of_what_the_numbers_stand_for(run, meaning, rng, group, size):
    x, w = rng.standard_normal((5, K)).astype(np.float32), rng.standard_normal((size, K)).astype(np.float32)
    w[0], x[1, 3], x[4, 8] = 0, 400, -90
    bias = rng.standard_normal(size).astype(np.float32)
    q, scale = meaning(QUANTIZE, w, bits=4, group=group)
    planes, row_scale, two_planes = meaning(ROW_PLANES, x)
    np.testing.assert_array_equal(two_planes[:, 0], [False, True, False, False, True])
    panels = meaning(PANEL_INTEGERS, q, format="panel4", columns=32)
    multipliers, channel = meaning(PANEL_MULTIPLIERS, scale, columns=32)
    shapes = f"n 2 {K}, n 1, n 1, 2 {K // 8} 128, 2 {K // group} 32, 2 1 32, {size}"
    y = run(WIDENED_LINEAR, planes, row_scale, two_planes, panels, multipliers, channel, bias, size=size, shapes=shapes, compiled=True)
    steps = channel.reshape(-1)[:size]
    wide = meaning(DEQUANTIZE, q, scale, bits=4, group=group, dtype="f32").astype(np.float64)
    given = (planes[:, 0] * 256.0 + planes[:, 1]) * row_scale
    assert (np.abs(y - bias - given @ wide.T) <= np.abs(given).sum(-1, keepdims=True) * steps * 1.01 + 1e-6).all()
    np.testing.assert_array_equal(y[:, 0], bias[0])


@pytest.mark.parametrize("strength", [1, 5, 10, 30, 100, 1000])
def test_rows_add_less_than_a_tenth_to_the_power_of_errors(meaning, rng, strength):
    """The 4-bit weights cause a mean square error. Quantising rows and widening weights add less than a tenth to this error, even if rows
    have strong outliers."""
    length = 2048
    x, w = rng.standard_normal((64, length)).astype(np.float32), rng.standard_normal((64, length)).astype(np.float32)
    x[np.arange(64), rng.integers(0, length, 64)] *= rng.uniform(1, strength, 64)
    q, scale = meaning(QUANTIZE, w, bits=4, group=32)
    planes, row_scale, two_planes = meaning(ROW_PLANES, x)
    multipliers, channel = meaning(PANEL_MULTIPLIERS, scale, columns=32)
    panels = meaning(PANEL_INTEGERS, q, format="panel4", columns=32)
    y = meaning(
        WIDENED_LINEAR,
        planes,
        row_scale,
        two_planes,
        panels,
        multipliers,
        channel,
        size=64,
        dtype="f32",
    )
    right = x.astype(np.float64) @ w.T.astype(np.float64)
    rounded = x.astype(np.float64) @ meaning(DEQUANTIZE, q, scale, bits=4, group=32, dtype="f32").T.astype(np.float64)
    power = [np.square(found - right).sum(-1) / np.square(x).sum(-1) for found in (y, rounded)]
    assert power[0].sum() < 1.1 * power[1].sum()
    assert two_planes.any() == (strength > 1)


def test_widened_weights_are_whole_numbers_of_steps(run, meaning, rng):
    """Widened weights are integer multiples of the channel's scale. The test reads single weights by a product with rows of the identity
    matrix."""
    q = rng.integers(0, 256, (32, 32)).astype(np.uint8)
    scale = rng.standard_normal((32, 2)).astype(np.float32)
    multipliers, channel = meaning(PANEL_MULTIPLIERS, scale, columns=32)
    panels, picks = meaning(PANEL_INTEGERS, q, format="panel4", columns=32), np.zeros((64, 2, 64), np.int8)
    picks[:, 1] = np.eye(64)
    rows = picks, np.ones((64, 1), np.float32), np.ones((64, 1), np.bool_)
    y = run(WIDENED_LINEAR, *rows, panels, multipliers, channel, size=32, shapes="n 2 64, n 1, n 1", compiled=True)
    numbers = np.stack([q & 15, q >> 4], -1).reshape(32, 64).astype(np.int32) - 8
    widened = (numbers * np.repeat(multipliers[0].T.astype(np.int32), 32, -1) + 4) >> 3
    np.testing.assert_array_equal(y.T, widened.astype(np.float32) * channel[0, 0][:, None])
    assert np.abs(widened).max() == 127


def test_each_row_multiplies_the_matrix_of_its_expert(run, meaning, rng):
    chosen = np.array([2, 0, 0, 3, 2], np.int32)
    x, w = rng.standard_normal((5, K)).astype(np.float32), rng.standard_normal((4, 40, K)).astype(np.float32)
    bias = rng.standard_normal((4, 40)).astype(np.float32)
    q, scale = meaning(QUANTIZE, w, bits=4, group=64)
    rows, panels = meaning(ROW_PLANES, x), meaning(PANEL_INTEGERS, q, format="panel4", columns=32)
    scales = run(PANEL_MULTIPLIERS, scale, columns=32, shapes="4 40 4", compiled=True)
    shapes = f"n 2 {K}, n 1, n 1, 4 2 {K // 8} 128, 4 2 4 32, 4 2 1 32, n, 4 40"
    found = run(EXPERT_WIDENED_LINEAR, *rows, panels, *scales, chosen, bias, size=40, shapes=shapes, compiled=True)
    for i, e in enumerate(chosen):
        of_expert = panels[e], *meaning(PANEL_MULTIPLIERS, scale[e], columns=32)
        expected = meaning(WIDENED_LINEAR, *(part[i : i + 1] for part in rows), *of_expert, bias[e], size=40, dtype="f32")
        np.testing.assert_array_equal(found[i], expected[0])


def test_deduction(deduced):
    scales = TupleType((tensor(((Dim.of(N) + 31) // 32, 4, 32), I8), tensor(((Dim.of(N) + 31) // 32, 1, 32), F32)))
    assert deduced(PANEL_MULTIPLIERS, tensor((N, 4), F32), columns=32) == scales
    assert deduced(PANEL_MULTIPLIERS, TensorType(None, F32, 2), columns=32) == TupleType(
        (TensorType(None, I8, 3), TensorType(None, F32, 3))
    )
    row = (tensor((N, 2, 64), I8), tensor((N, 1), F32), tensor((N, 1), BOOL))
    weight = (tensor((2, 8, 128), U8), tensor((2, 2, 32), I8), tensor((2, 1, 32), F32))
    assert deduced(WIDENED_LINEAR, *row, *weight, size=40) == tensor((N, 40), F32)
    several = (tensor((9, 2, 8, 128), U8), tensor((9, 2, 2, 32), I8), tensor((9, 2, 1, 32), F32))
    assert deduced(EXPERT_WIDENED_LINEAR, *row, *several, tensor((N,), DType.I32), size=40) == tensor((N, 40), F32)
    with pytest.raises(AnnotationError, match="dimension 0 of bias is 8, expected 9"):
        deduced(EXPERT_WIDENED_LINEAR, *row, *several, tensor((N,), DType.I32), tensor((8, 40), F32), size=40)
    assert deduced(WIDENED_LINEAR, TensorType(None, I8, 3), *row[1:], *weight, size=40) == TensorType(None, F32, 2)
    with pytest.raises(AnnotationError, match="dimension 0 of panels is 2, expected 3"):
        deduced(WIDENED_LINEAR, *row, *weight, size=80)
    with pytest.raises(AnnotationError, match="the number of groups of multipliers is n, expected a number"):
        deduced(WIDENED_LINEAR, *row, weight[0], tensor((2, N, 32), I8), weight[2], size=40)
    with pytest.raises(AnnotationError, match="dimension 1 of panels is n, expected a number"):
        deduced(WIDENED_LINEAR, *row, tensor((2, N, 128), U8), *weight[1:], size=40)
    with pytest.raises(AnnotationError, match="dimension 1 of planes is 1, expected 2"):
        deduced(WIDENED_LINEAR, tensor((N, 1, 64), I8), *row[1:], *weight, size=40)
    with pytest.raises(AnnotationError, match="multipliers holds u8, expected i8"):
        deduced(WIDENED_LINEAR, *row, weight[0], tensor((2, 2, 32), U8), weight[2], size=40)
