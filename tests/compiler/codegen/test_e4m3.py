"""Conversions between e4m3 and f32 give the results of ml_dtypes, for one lane and for many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.ir.dtypes import DType
from tests.compiler.codegen.test_halves import LANES, cast, expect_equal

ALL = np.arange(256, dtype=np.uint8).view(DType.E4M3.numpy)


@pytest.mark.parametrize("lanes", LANES)
def test_every_byte_is_decoded_exactly(lanes: int, run_native: Any) -> None:
    found = np.zeros(ALL.shape, np.float32)
    run_native(cast(DType.E4M3, DType.F32, len(ALL), lanes), [ALL, found])
    expect_equal(found, ALL.astype(np.float32))


@pytest.mark.parametrize("lanes", LANES)
def test_numbers_are_rounded_to_the_nearest_byte(lanes: int, run_native: Any) -> None:
    """Each e4m3 number, the midpoint between that number and the next one, and the neighbours of the midpoint are rounded as ml_dtypes
    rounds them."""
    positive = np.arange(0x7F, dtype=np.uint8)
    wide = positive.view(DType.E4M3.numpy).astype(np.float32)
    middle = (wide + np.append(wide[1:], np.float32(480))) / 2  # 480 would follow the largest number
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    extremes = np.array([1e38, 1e-38, 1e-45, 2.0**-10, 480, np.inf, np.nan, 0], np.float32)
    values = np.concatenate([x * sign for x in (wide, middle, *beside, extremes) for sign in (np.float32(1), np.float32(-1))])
    values = values[: len(values) // 16 * 16]
    found = np.zeros(values.shape, DType.E4M3.numpy)
    run_native(cast(DType.F32, DType.E4M3, len(values), lanes), [values, found])
    with np.errstate(all="ignore"):
        expected = values.astype(DType.E4M3.numpy)
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), np.isnan(expected.astype(np.float32)))
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))
