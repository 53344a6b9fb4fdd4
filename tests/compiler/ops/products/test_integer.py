"""Products in integers: the layout of packed panels, and the product of quantised rows and panels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Var
from compiler.ir.types import tensor
from compiler.ops.products.experts import EXPERT_INTEGER_LINEAR
from compiler.ops.products.integer import INTEGER_LINEAR, PANEL_INTEGERS, PANEL_SCALES
from compiler.ops.products.integer_rows import QUANTIZE_ROWS
from compiler.ops.products.quantize import DEQUANTIZE, QUANTIZE
from runtime.errors import ArgumentMismatch
from runtime.session import Session
from tests.compiler.ops.conftest import program

F32, I8, I32, U8 = DType.F32, DType.I8, DType.I32, DType.U8
N = DimVar("n")


def test_panels_of_bytes_hold_fours_of_each_column(run):
    q = np.arange(24, dtype=np.int8).reshape(3, 8)
    panels = run(PANEL_INTEGERS, q, columns=2, shapes="3 8", compiled=True)
    np.testing.assert_array_equal(panels[0, 0] - 128, [0, 1, 2, 3, 8, 9, 10, 11])
    np.testing.assert_array_equal(panels[1, 1] - 128, [20, 21, 22, 23, 0, 0, 0, 0])


def test_panels_beside_words_hold_two_twos(run):
    q = np.arange(16, dtype=np.int8).reshape(2, 8)
    panels = run(PANEL_INTEGERS, q, columns=2, format="panel8_words", shapes="2 8", compiled=True)
    np.testing.assert_array_equal(panels[0] - 128, [[0, 2, 1, 3, 8, 10, 9, 11], [4, 6, 5, 7, 12, 14, 13, 15]])


def test_panels_of_halves_hold_two_fours_of_each_column(run):
    q = np.array([[0x10, 0x32, 0x54, 0x76]], np.uint8)  # the numbers 0 to 7, two per byte
    panels = run(PANEL_INTEGERS, q, format="panel4", columns=2, compiled=True)
    np.testing.assert_array_equal(panels, [[[0x40, 0x51, 0x62, 0x73, 0x88, 0x88, 0x88, 0x88]]])


@pytest.mark.parametrize(("bits", "group", "planes"), [(8, 0, 2), (8, 32, 2), (4, 32, 1), (4, 64, 1), (8, 0, 1), (4, 0, 2)])
@pytest.mark.parametrize("size", [33, 64])
def test_product_is_that_of_what_the_numbers_stand_for(run, meaning, rng, bits, group, planes, size):
    x, w = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((size, 64)).astype(np.float32)
    bias = rng.standard_normal(size).astype(np.float32)
    rows = meaning(QUANTIZE_ROWS, x, bits=8 * planes, group=group)
    q, scale = meaning(QUANTIZE, w, bits=bits, group=group)
    panels, scales = meaning(PANEL_INTEGERS, q, format=f"panel{bits}", columns=32), meaning(PANEL_SCALES, scale, columns=32)
    groups = scale.shape[1]
    shapes = f"n {planes} 64, n {groups}, n {planes} {groups}, 2 {bits * 2} 128, 2 {groups} 32, {size}"
    y = run(INTEGER_LINEAR, *rows, panels, scales, bias, format=f"panel{bits}", size=size, shapes=shapes, compiled=True)
    numbers = rows[0].astype(np.float64)
    exact = (numbers[:, 0] if planes == 1 else numbers[:, 0] * 256 + numbers[:, 1]) * np.repeat(rows[1], 64 // groups, -1)
    expected = exact @ meaning(DEQUANTIZE, q, scale, bits=bits, group=group, dtype="f32").astype(np.float64).T + bias
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chooses", [False, True])
def test_scales_in_units_are_the_scales_that_they_decode_to(run, meaning, rng, chooses):
    """A product whose scales are stored as integers times a unit gives the same result as with the decoded scales. Weights are not centred:
    they are multiplied as they are stored, from 0 to 15."""
    matrices = (2,) if chooses else ()
    x, q = rng.standard_normal((5, 64)).astype(np.float32), rng.integers(0, 256, (*matrices, 33, 32)).astype(np.uint8)
    scale, unit = rng.integers(-32, 32, (*matrices, 33, 4)).astype(np.int8), rng.random((*matrices, 33, 2)).astype(np.float16)
    rows = meaning(QUANTIZE_ROWS, x, bits=8, group=16)
    bias, experts = rng.standard_normal((*matrices, 33)).astype(np.float32), np.array([1, 0, 0, 1, 0], np.int32)
    panels = meaning(PANEL_INTEGERS, q, format="panel4", columns=32)
    scales, units = (meaning(PANEL_SCALES, level, columns=32) for level in (scale, unit))
    op, given = (EXPERT_INTEGER_LINEAR, (scales, experts, units, bias)) if chooses else (INTEGER_LINEAR, (scales, units, bias))
    first = "2 " if chooses else ""
    shapes = ["n 1 64", "n 4", "n 1 4", f"{first}2 8 128", f"{first}2 4 32", *(["n"] if chooses else []), f"{first}2 2 32", f"{first}33"]
    attrs = {"format": "panel4", "size": 33, "centred": False, "in_units": True}
    y = run(op, *rows, panels, *given, **attrs, shapes=", ".join(shapes), compiled=True)
    wide = scale * np.repeat(unit.astype(np.float64), 2, -1)
    w = np.stack([q & 15, q >> 4], -1).reshape(*matrices, 33, 64) * np.repeat(wide, 16, -1)
    values = rows[0][:, 0] * np.repeat(rows[1].astype(np.float64), 16, -1)
    expected = values @ w.T + bias if not chooses else np.stack([w[e] @ v + bias[e] for e, v in zip(experts, values, strict=True)])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(("bits", "in_units"), [(4, False), (4, True), (8, False)])
def test_offsets_are_subtracted_from_the_weights(run, meaning, rng, bits, in_units, chooses):
    """The offset of a group is subtracted from each of its weights. Rows of 16 bits have two planes, and the sums of both count. Offsets in
    units have units of their own."""
    matrices, planes, groups = ((2,) if chooses else ()), bits // 4, 4
    x, low = rng.standard_normal((5, 64)).astype(np.float32) + 1, (0, 256) if bits == 4 else (-128, 128)
    q = rng.integers(*low, (*matrices, 33, 8 * bits)).astype(np.uint8 if bits == 4 else np.int8)
    *rows, sums = meaning(QUANTIZE_ROWS, x, bits=8 * planes, group=16, sums=True)
    bias, experts = rng.standard_normal((*matrices, 33)).astype(np.float32), np.array([1, 0, 0, 1, 0], np.int32)
    if in_units:
        numbers = [rng.integers(-32, 32, (*matrices, 33, groups)).astype(np.int8) for _ in range(2)]
        units = [rng.random((*matrices, 33, count)).astype(np.float16) for count in (2, 1)]
        scale, offset = (n * np.repeat(u.astype(np.float64), groups // u.shape[-1], -1) for n, u in zip(numbers, units, strict=True))
        parts = [numbers[0], units[0], numbers[1], units[1]]
    else:
        scale, offset = parts = [rng.random((*matrices, 33, groups)).astype(np.float32) for _ in range(2)]
    panels = meaning(PANEL_INTEGERS, q, format=f"panel{bits}", columns=32)
    weight_scale, *others = (meaning(PANEL_SCALES, part, columns=32) for part in parts)
    others.insert(in_units, sums)
    first = "2 " if chooses else ""
    shapes = [f"n {planes} 64", f"n {groups}", f"n {planes} {groups}", f"{first}2 {2 * bits} 128", f"{first}2 {groups} 32"]
    packed = [f"{first}2 {part.shape[-1]} 32" for part in parts[1:]]
    shapes += [*(["n"] if chooses else []), *packed[:in_units], f"n {groups}", *packed[in_units:], f"{first}33"]
    op, given = (EXPERT_INTEGER_LINEAR, (experts,)) if chooses else (INTEGER_LINEAR, ())
    attrs = {"format": f"panel{bits}", "size": 33, "centred": bits == 8, "in_units": in_units, "has_offset": True}
    y = run(op, *rows, panels, weight_scale, *given, *others, bias, **attrs, shapes=", ".join(shapes), compiled=True)
    stored = np.stack([q & 15, q >> 4], -1).reshape(*matrices, 33, 64) if bits == 4 else q
    w = stored * np.repeat(scale.astype(np.float64), 16, -1) - np.repeat(offset.astype(np.float64), 16, -1)
    numbers = rows[0].astype(np.float64)
    values = (numbers[:, 0] if planes == 1 else numbers[:, 0] * 256 + numbers[:, 1]) * np.repeat(rows[1].astype(np.float64), 16, -1)
    expected = values @ w.T + bias if not chooses else np.stack([w[e] @ v + bias[e] for e, v in zip(experts, values, strict=True)])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(
    ("group", "kind"), [(16, "e2m1"), (32, "e2m1"), (32, "iq4"), (32, "iq3_s"), (32, "iq3_xxs"), (16, "iq2"), (16, "iq1")]
)
def test_numbers_of_tables_are_multiplied_exactly(run, meaning, rng, chooses, group, kind):
    matrices = (2,) if chooses else ()
    x, q = rng.standard_normal((5, 64)).astype(np.float32), rng.integers(0, 256, (*matrices, 33, 32)).astype(np.uint8)
    q &= 0x33 if kind == "ternary" else 0xFF  # codes of ternary numbers are less than 4
    each, lines = 64 // group, 4 if kind == "ternary" else 8
    scale = 2.0 ** rng.integers(-9, 3, (*matrices, 33, each)).astype(np.float32)
    rows, experts = meaning(QUANTIZE_ROWS, x, bits=8, group=group), np.array([1, 0, 0, 1, 0], np.int32)
    panels, scales = meaning(PANEL_INTEGERS, q, format=f"panel_{kind}", columns=32), meaning(PANEL_SCALES, scale, columns=32)
    op, given = (EXPERT_INTEGER_LINEAR, (scales, experts)) if chooses else (INTEGER_LINEAR, (scales,))
    first = "2 " if chooses else ""
    shapes = ["n 1 64", f"n {each}", f"n 1 {each}", f"{first}2 {lines} 128", f"{first}2 {each} 32", *(["n"] if chooses else [])]
    y = run(op, *rows, panels, *given, format=f"panel_{kind}", size=33, shapes=", ".join(shapes), compiled=True)
    w = meaning(DEQUANTIZE, q, scale, bits=4, group=group, dtype="f32", kind=kind).astype(np.float64)
    values = rows[0][:, 0] * np.repeat(rows[1].astype(np.float64), group, -1)
    expected = values @ w.T if not chooses else np.stack([w[e] @ v for e, v in zip(experts, values, strict=True)])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_product_by_six_bits_is_that_by_eight(run, meaning, rng):
    """Weights that fit in 6 bits give the same bits in panels of 6 and of 8 bits, also in a last panel that they do not fill."""
    x, q = rng.standard_normal((5, 64)).astype(np.float32), rng.integers(-32, 32, (33, 64)).astype(np.int8)
    rows, scales = meaning(QUANTIZE_ROWS, x, bits=16, group=16), meaning(PANEL_SCALES, rng.random((33, 4)).astype(np.float32), columns=32)
    results = []
    for format, lines in (("panel6", 12), ("panel8", 16)):
        panels = run(PANEL_INTEGERS, q, columns=32, format=format, compiled=True)
        np.testing.assert_array_equal(panels, meaning(PANEL_INTEGERS, q, columns=32, format=format))
        shapes = f"n 2 64, n 4, n 2 4, 2 {lines} 128, 2 4 32"
        results.append(run(INTEGER_LINEAR, *rows, panels, scales, format=format, size=33, shapes=shapes, compiled=True))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("group", [0, 32])
def test_product_by_words_is_that_by_two_planes(run, meaning, rng, group):
    x, w = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((33, 64)).astype(np.float32)
    q, scale = meaning(QUANTIZE, w, bits=8, group=group)
    scales, results = meaning(PANEL_SCALES, scale, columns=32), {}
    for held, planes, format in (("i16", 1, "panel8_words"), ("i8", 2, "panel8")):
        rows = meaning(QUANTIZE_ROWS, x, bits=16, group=group, dtype=held)
        panels, groups = meaning(PANEL_INTEGERS, q, columns=32, format=format), scale.shape[1]
        shapes = f"n {planes} 64, n {groups}, n {planes} {groups}, 2 16 128, 2 {groups} 32"
        results[held] = run(INTEGER_LINEAR, *rows, panels, scales, format=format, size=33, shapes=shapes, compiled=True)
    np.testing.assert_array_equal(results["i16"], results["i8"])


def test_leading_axes_and_small_floats(run, meaning, rng):
    x, w = rng.standard_normal((2, 3, 32)).astype(np.float32), rng.standard_normal((20, 32)).astype(np.float32)
    rows = meaning(QUANTIZE_ROWS, x, bits=8, group=0)
    q, scale = meaning(QUANTIZE, w, bits=8, dtype="bf16")
    panels, scales = meaning(PANEL_INTEGERS, q, columns=32), meaning(PANEL_SCALES, scale, columns=32)
    y = run(INTEGER_LINEAR, *rows, panels, scales, size=20, dtype="bf16", compiled=True, shapes="b t 1 32, b t 1, b t 1 1, 1 8 128, 1 1 32")
    assert y.dtype == ml_dtypes.bfloat16
    assert y.shape == (2, 3, 20)


def test_deduction(deduced):
    assert deduced(PANEL_INTEGERS, tensor((N, 64), I8), columns=32) == tensor(((Dim.of(N) + 31) // 32, 16, 128), U8)
    row = (tensor((N, 1, 64), I8), tensor((N, 2), F32), tensor((N, 1, 2), I32))
    weight = (tensor((2, 16, 128), U8), tensor((2, 2, 32), F32))
    assert deduced(INTEGER_LINEAR, *row, *weight, size=40) == tensor((N, 40), F32)
    with pytest.raises(AnnotationError, match="last dimension of q is 6, expected a multiple of 4"):
        deduced(PANEL_INTEGERS, tensor((2, 6), I8), columns=32)
    with pytest.raises(AnnotationError, match="dimension 0 of panels is 2, expected 3"):
        deduced(INTEGER_LINEAR, *row, *weight, size=80)
    with pytest.raises(AnnotationError, match="attribute format is 'panel3', expected one of panel8, panel8_words, panel6, pa"):
        deduced(PANEL_INTEGERS, tensor((2, 8), U8), format="panel3", columns=32)
    units = (tensor((2, 16, 128), U8), tensor((2, 2, 32), I8), tensor((2, 1, 32), F32))
    assert deduced(INTEGER_LINEAR, *row, *units, size=40, in_units=True) == tensor((N, 40), F32)
    with pytest.raises(AnnotationError, match="weight_scale holds f32, expected i8 in units"):
        deduced(INTEGER_LINEAR, *row, *weight, units[-1], size=40, in_units=True)
    with pytest.raises(AnnotationError, match="unit has 3 units, expected a divisor of 2, the number of groups"):
        deduced(INTEGER_LINEAR, *row, *units[:2], tensor((2, 3, 32), F32), size=40, in_units=True)
    sums, offset = row[1], tensor((2, 2, 32), F32)
    assert deduced(INTEGER_LINEAR, *row, *weight, sums, offset, size=40, has_offset=True) == tensor((N, 40), F32)
    with pytest.raises(AnnotationError, match="offset holds f32, expected i8 in units"):
        deduced(INTEGER_LINEAR, *row, *units, sums, offset, units[-1], size=40, in_units=True, has_offset=True)
    with pytest.raises(AnnotationError, match="dimension 1 of offset is 1, expected 2"):
        deduced(INTEGER_LINEAR, *row, *weight, sums, tensor((2, 1, 32), F32), size=40, has_offset=True)
    with pytest.raises(AnnotationError, match="weight_scale has 1 groups, expected 2 beside offsets"):
        deduced(INTEGER_LINEAR, *row, weight[0], tensor((2, 1, 32), F32), sums, offset, size=40, has_offset=True)
    with pytest.raises(AnnotationError, match="dimension -1 of panels is 1, expected a number of at least 4"):
        deduced(INTEGER_LINEAR, *row, tensor((2, 16, 1), U8), weight[1], size=40)
    with pytest.raises(AnnotationError, match="the number of groups of weight_scale is n, expected a number"):
        deduced(INTEGER_LINEAR, *row, weight[0], tensor((2, N, 32), F32), size=40)
    with pytest.raises(AnnotationError, match="q holds i8, expected u8 for panel4"):
        deduced(PANEL_INTEGERS, tensor((2, 8), I8), format="panel4", columns=32)
    for format, wanted in (("panel8", "i8"), ("panel8_words", "i16")):
        with pytest.raises(AnnotationError, match=f"q holds u8, expected {wanted} with {format}"):
            deduced(INTEGER_LINEAR, tensor((N, 1, 64), U8), *row[1:], *weight, format=format, size=40)


def test_product_over_panels_of_another_width(run, meaning, rng):
    """A product whose panels have a width that no tile supports is slow, but computes the right result."""
    w = rng.integers(-128, 128, (10, 16)).astype(np.int8)
    rows = meaning(QUANTIZE_ROWS, rng.standard_normal((3, 16)).astype(np.float32), bits=16, group=0)
    panels = meaning(PANEL_INTEGERS, w, format="panel8", columns=4)
    run(INTEGER_LINEAR, *rows, panels, np.ones((3, 1, 4), np.float32), size=10, compiled=True, shapes="n 2 16, n 1, n 2 1, 3 4 16, 3 1 4")


def test_scales_of_another_number_of_groups_are_refused(compiled_once):
    """The groups of the rows are symbolic, so only the call tells that the weights have more scales than the rows."""
    groups = DimVar("g")
    types = tensor((N, 1, 64), I8), tensor((N, groups), F32), tensor((N, 1, groups), I32), tensor((2, 16, 128), U8), tensor((2, 4, 32), F32)
    atoms = [Var(name, type_) for name, type_ in zip("abcde", types, strict=True)]
    session = Session(compiled_once(program(INTEGER_LINEAR, atoms, {"size": 40})))
    arrays = [np.zeros(shape, dtype) for shape, dtype in (((3, 1, 64), np.int8), ((3, 2), np.float32), ((3, 1, 2), np.int32))]
    with pytest.raises(ArgumentMismatch, match="operand 4"):
        session.call("main", *arrays, np.zeros((2, 16, 128), np.uint8), np.zeros((2, 4, 32), np.float32))
    session.close()
