"""The search for scales and shifts: least squares, errors, and the numbers that are stored."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.numbers import TABLES, Kind
from compiler.ir.op import OPS
from compiler.ir.types import tensor
from compiler.ops.products.refine import range_of
from compiler.ops.tables import INTERPRET

RNG = np.random.default_rng(3)
ROWS, GROUPS, GROUP = 3, 2, 16
X = RNG.standard_normal((ROWS, GROUPS * GROUP)).astype(np.float32)
W = RNG.random(X.shape).astype(np.float32)


def start(shifted: bool, largest: int = 8) -> tuple[np.ndarray, ...]:
    grouped = X.reshape(ROWS, GROUPS, GROUP)
    if not shifted:
        return (np.abs(grouped).max(-1) / np.float32(largest),)
    low = grouped.min(-1)
    return (grouped.max(-1) - low) / np.float32(15), -low


@pytest.mark.parametrize(
    ("bits", "shifted", "kind", "largest"),
    [(4, True, "int", 8), (4, False, "int", 8), (6, False, "int", 8), (6, True, "int", 8), (4, False, "iq4", 113), (4, False, "iq4", -113)],
)
def test_a_refined_pair_leaves_the_error_that_it_states_or_less(bits, shifted, kind, largest):
    attrs = {"bits": bits, "group": GROUP, "shifted": shifted, "kind": kind}
    given = start(shifted, largest)
    before = INTERPRET["group_errors"](X, W, *given, **attrs)
    *better, stated = INTERPRET["refine_groups"](X, W, *given, **attrs)
    after = INTERPRET["group_errors"](X, W, *better, **attrs)
    assert (stated <= before + 1e-5).all() and (after <= stated + 1e-5).all()
    assert stated.sum() < before.sum()


def test_least_squares_is_that_of_numpy():
    scale, shift = start(True)
    better, moved, error = INTERPRET["refine_groups"](X, W, scale, shift, bits=4, group=GROUP, shifted=True, kind="int")
    for row in range(ROWS):
        for g in range(GROUPS):
            x, w = (a[row, g * GROUP : (g + 1) * GROUP].astype(np.float64) for a in (X, W))
            n = np.clip(np.rint((x + shift[row, g]) / scale[row, g]), 0, 15)
            root = np.sqrt(w)
            (s, m), left, *_ = np.linalg.lstsq(np.stack([n * root, -root], 1), x * root, rcond=None)
            np.testing.assert_allclose([better[row, g], moved[row, g], error[row, g]], [s, m, left[0]], rtol=2e-3)


def test_numbers_are_stored_as_dequantize_reads_them():
    for bits, shifted in ((4, True), (4, False), (6, False)):
        given = start(shifted)
        q = INTERPRET["round_groups"](X, *given, bits=bits, group=GROUP, shifted=shifted, kind="int")
        found = INTERPRET["dequantize"](q, *given, bits=bits, group=GROUP, dtype="f32", shifted=shifted, kind="int")
        step = np.repeat(given[0], GROUP, -1)
        assert (np.abs(found - X) <= 0.5 * step + np.where(shifted, 0, 0.5) * step + 1e-6).all()
        errors = INTERPRET["group_errors"](X, np.ones_like(X), *given, bits=bits, group=GROUP, shifted=shifted, kind="int")
        np.testing.assert_allclose(errors, np.square(found - X).reshape(ROWS, GROUPS, GROUP).sum(-1), rtol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_codes_of_a_table_stand_for_the_nearest_numbers(sign):
    (scale,) = start(shifted=False, largest=sign * 113)
    attrs = {"bits": 4, "group": GROUP, "shifted": False, "kind": "iq4"}
    q = INTERPRET["round_groups"](X, scale, **attrs)
    found = INTERPRET["dequantize"](q, scale, dtype="f32", **attrs)
    every = TABLES[Kind.IQ4].astype(np.float32) * np.repeat(scale, GROUP, -1)[..., None]
    np.testing.assert_allclose(np.abs(found - X), np.abs(every - X[..., None]).min(-1), atol=1e-6)
    errors = INTERPRET["group_errors"](X, W, scale, **attrs)
    np.testing.assert_allclose(errors, (W * np.square(found - X)).reshape(ROWS, GROUPS, GROUP).sum(-1), rtol=1e-4)


def test_a_group_of_equal_elements_or_without_importance_keeps_its_scale():
    x, w = np.full((1, GROUP), 0.25, np.float32), np.ones((1, GROUP), np.float32)
    zero, quarter = np.zeros((1, 1), np.float32), np.full((1, 1), -0.25, np.float32)
    better, moved, error = INTERPRET["refine_groups"](x, w, zero, quarter, bits=4, group=GROUP, shifted=True, kind="int")
    assert (better, moved, error) == (0, pytest.approx(-0.25), pytest.approx(0, abs=1e-7))
    better, moved, _ = INTERPRET["refine_groups"](x, 0 * w, zero + 0.5, quarter, bits=4, group=GROUP, shifted=True, kind="int")
    assert (better, moved) == (0.5, -0.25)


def test_ranges():
    assert range_of(4, True) == (0, 15) and range_of(4, False) == (-8, 7) and range_of(6, False) == (-32, 31)


@pytest.mark.parametrize(
    ("shapes", "attrs", "text"),
    [
        (((3, 32), (3, 32), (3, 2)), {"group": 16}, "has 3 operands, expected 4: a shift"),
        (((3, 32), (3, 32), (3, 2), (3, 2)), {"group": 12}, "expected a multiple of the group size, 12"),
        (((3, 32), (3, 16), (3, 2), (3, 2)), {"group": 16}, "importance is"),
        (((3, 32), (3, 32), (3, 4), (3, 2)), {"group": 16}, "scale is"),
        (((3, 32), (3, 32), (3, 2)), {"group": 16, "bits": 8, "shifted": False}, "attribute bits is 8, expected 4 or 6"),
        (((3, 32), (3, 32), (3, 2)), {"group": 16, "kind": "e2m1", "shifted": False}, "attribute kind is 'e2m1', expected int or iq4"),
        (((3, 32), (3, 32), (3, 2)), {"group": 16, "kind": "iq4", "bits": 6, "shifted": False}, "is iq4, expected 4 bits and no shift"),
        (((3, 32), (3, 32), (3, 2), (3, 2)), {"group": 16, "kind": "iq4"}, "is iq4, expected 4 bits and no shift"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shapes, attrs, text):
    op = OPS["refine_groups"]
    with pytest.raises(AnnotationError, match=text):
        op.deduce(tuple(tensor(shape, DType.F32) for shape in shapes), {**op.attributes, **attrs})
