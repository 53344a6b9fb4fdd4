"""Rows of a quantised table: what they are, and that panels hold the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import tensor
from compiler.machine.formats import PANELS, TablePanels
from compiler.ops.products.integer import PANEL_INTEGERS, PANEL_SCALES
from compiler.ops.products.look_up import LOOK_UP
from compiler.ops.products.quantize import DEQUANTIZE

SIZE, LENGTH, GROUP, COLUMNS = 37, 64, 16, 16
IDS = np.array([0, 36, 5, 5, -3, 99], np.int32)  # the last two are outside the table: the nearest rows replace them
ROWS = np.clip(IDS, 0, SIZE - 1)


def drawn(rng, bits, offset, *, in_units):
    """Return the parts of a random table, in the order of the operands, and its values."""
    q = rng.integers(0, 256, (SIZE, LENGTH // 2)).astype(np.uint8) if bits == 4 else rng.integers(-32, 32, (SIZE, LENGTH)).astype(np.int8)
    groups = (SIZE, LENGTH // GROUP)
    if offset == "zero":
        return q, [rng.random(groups, np.float32), rng.integers(0, 16, groups).astype(np.uint8 if bits == 4 else np.int16)]
    levels = []
    for _ in range(2 if offset else 1):
        levels += [rng.integers(-32, 32, groups).astype(np.int8)] if in_units else [rng.standard_normal(groups).astype(np.float16)]
        levels += [rng.random((SIZE, 2), np.float32)] if in_units else []
    return q, levels


def values(meaning, q, levels, bits, offset, *, in_units, kind="int"):
    if in_units:
        levels = [meaning(DEQUANTIZE, *levels[i : i + 2], bits=8, group=LENGTH // GROUP // 2) for i in range(0, len(levels), 2)]
    return meaning(DEQUANTIZE, q, *levels, bits=bits, group=GROUP, shifted=offset == "shift", kind=kind)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(("offset", "in_units"), [("", False), ("zero", False), ("shift", False), ("", True), ("shift", True)])
def test_rows_are_those_of_the_dequantised_table(run, meaning, rng, bits, offset, in_units):
    q, levels = drawn(rng, bits, offset, in_units=in_units)
    found = run(LOOK_UP, IDS, q, *levels, size=SIZE, length=LENGTH, bits=bits, offset=offset, in_units=in_units, compiled=True)
    np.testing.assert_array_equal(found, values(meaning, q, levels, bits, offset, in_units=in_units)[ROWS])


@pytest.mark.parametrize("format", PANELS)
@pytest.mark.parametrize(("offset", "in_units"), [("", False), ("shift", False), ("", True), ("shift", True)])
def test_panels_hold_the_same_rows(run, meaning, rng, format, offset, in_units):
    panels = PANELS[format]
    kind = str(panels.kind) if isinstance(panels, TablePanels) else "int"
    if kind != "int" and offset:
        pytest.skip("numbers of a table have no offsets")
    q, levels = drawn(rng, panels.held_bits, offset, in_units=in_units)
    if kind == "ternary":
        q &= 0x33  # codes are less than 4
    packed = [meaning(PANEL_SCALES, level, columns=COLUMNS) for level in levels]
    attrs = {
        "size": SIZE,
        "length": LENGTH,
        "bits": panels.held_bits,
        "kind": kind,
        "offset": offset,
        "in_units": in_units,
        "format": format,
    }
    found = run(LOOK_UP, IDS, meaning(PANEL_INTEGERS, q, format=format, columns=COLUMNS), *packed, **attrs, compiled=True)
    np.testing.assert_array_equal(found, values(meaning, q, levels, panels.held_bits, offset, in_units=in_units, kind=kind)[ROWS])


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        ({"format": "panel9"}, "attribute format is 'panel9', expected an empty text or one of panel8"),
        ({"format": "panel4", "kind": "iq4", "bits": 4}, "attribute kind is iq4, expected that of the numbers in panel4"),
        ({"offset": "mean"}, "attribute offset is 'mean', expected an empty text, zero or shift"),
        ({"in_units": True}, "there are 3 operands, expected ids, numbers, scale, unit"),
        ({"size": 36}, r"dimension 0 of numbers is 37, expected 36"),
        ({"length": 66}, "scale has 4 groups, expected a divisor of 66"),
    ],
)
def test_what_is_no_table_is_refused(deduced, attrs, text):
    operands = tensor((3,), DType.I32), tensor((SIZE, LENGTH), DType.I8), tensor((SIZE, 4), DType.F32)
    with pytest.raises(AnnotationError, match=text):
        deduced(LOOK_UP, *operands, **{"size": SIZE, "length": LENGTH, **attrs})
