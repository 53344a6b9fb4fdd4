"""Conversions between f16 and f32 that use no instructions for f16 give NumPy's results, for one lane and for many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.codegen.halves import with_conversions
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Cast, Load
from compiler.ir.loops.statements import For, LoopKind, Store
from compiler.machine.target import host

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
TARGET = replace(host(), has_f16=False)
LANES = [1, 4, 16]


def cast(source: DType, dtype: DType, count: int, lanes: int) -> PrimFunc:
    x, y = Buffer("x", (Dim.of(count),), source), Buffer("y", (Dim.of(count),), dtype)
    i, v = DimVar("i", upper=count // lanes - 1), DimVar("v", upper=lanes - 1)
    at = (i * lanes + v,)
    vector = For(v, Dim.of(lanes), Store(y, at, Cast(Load(x, at), dtype)), LoopKind.VECTOR)
    return PrimFunc((x, y), 1, For(i, Dim.of(count // lanes), vector))


def expect_equal(found: Any, expected: Any) -> None:
    """Require equal bits. Two NaNs may have different bits."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert found[numbers].tobytes() == expected[numbers].tobytes()


@pytest.mark.parametrize("lanes", LANES)
def test_every_half_is_widened_exactly(lanes: int, run_native: Any) -> None:
    found = np.zeros(ALL.shape, np.float32)
    run_native(cast(DType.F16, DType.F32, len(ALL), lanes), [ALL, found], target=TARGET)
    expect_equal(found, ALL.astype(np.float32))


@pytest.mark.parametrize("lanes", LANES)
def test_numbers_are_rounded_to_the_nearest_half(lanes: int, run_native: Any) -> None:
    """Each f16 number, the midpoint between that number and the next one, and the neighbours of the midpoint are rounded as NumPy rounds
    them."""
    with np.errstate(all="ignore"):
        wide, after = ALL.astype(np.float32), np.nextafter(ALL, np.float16(np.inf)).astype(np.float32)
        after = np.where(np.isinf(after) & np.isfinite(wide), np.float32(65536), after)  # 65536 would follow the largest finite f16
        middle = (wide + after) / 2
        beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
        extremes = np.array([1e38, -1e38, 1e-38, 1e-45, 65519.996, 65520, 65536, 2.0**-25, np.nan, -np.nan] * 8, np.float32)
        values = np.concatenate([wide, middle, *beside, extremes])
        expected = values.astype(np.float16)
    found = np.zeros(values.shape, np.float16)
    run_native(cast(DType.F32, DType.F16, len(values), lanes), [values, found], target=TARGET)
    expect_equal(found, expected)


def test_names_of_intrinsics_follow_the_type() -> None:
    load, widened = "%a = call <4 x half> @llvm.masked.load.v4f16.p0(ptr %half)", "%b = fpext <4 x half> %a to <4 x float>"
    changed = with_conversions(f"{load}\n{widened}\n%c = fpext float %d to double")
    assert "%a = call <4 x i16> @llvm.masked.load.v4i16.p0(ptr %half)\n%b = call <4 x float> @f16.fpext.4(<4 x i16> %a)\n" in changed
    assert "%c = fpext float %d to double" in changed and changed.count("define internal") == 1
    assert with_conversions("%c = fpext float %d to double") == "%c = fpext float %d to double"
