"""Sums by the software GPU's matrix units equal a slow exact computation of the same truncated sums."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.gpu.ptx.instructions.rounding import ELEMENTS, product

# compute capability -> (products per fused sum, bits of a term that are kept after the binary point)
BITS = {(9, 0): (16, 25), (8, 0): (8, 24)}


def exponent(value: Fraction, least: int) -> int:
    if value == 0:
        return -300
    found = math.floor(math.log2(abs(value)))
    while Fraction(2) ** found > abs(value):
        found -= 1
    while Fraction(2) ** (found + 1) <= abs(value):
        found += 1
    return max(found, least)


def cut(value: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(value / unit) * unit


def toward_zero(value: Fraction) -> Fraction:
    """Round a fraction toward zero to a float32 number."""
    return cut(value, Fraction(2) ** (exponent(value, -126) - 23)) if value else value


def slow(a: list[float], b: list[float], c: float, terms: int, fraction: int) -> float:
    total = Fraction(c)
    for start in range(0, len(a), terms):
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a[start : start + terms], b[start : start + terms], strict=True)]
        largest = max([exponent(x, -126) + exponent(y, -126) for x, y in pairs] + [exponent(total, -126), -126])
        unit = Fraction(2) ** (largest - fraction)
        total = toward_zero(sum((cut(x * y, unit) for x, y in pairs), cut(total, unit)))
    return float(total)


@pytest.mark.parametrize("arch", BITS)
@pytest.mark.parametrize("spread", [0, 6, 14])
def test_a_sum_is_aligned_cut_and_summed_at_once(arch: tuple[int, int], spread: int) -> None:
    random = np.random.default_rng(spread)
    a, b = (
        (random.standard_normal((8, 16)) * 2.0 ** random.integers(-spread, spread + 1, (8, 16))).astype(ml_dtypes.bfloat16)
        for _ in range(2)
    )
    c = (random.standard_normal((8, 8)) * 2.0 ** random.integers(-spread, spread + 1, (8, 8))).astype(np.float32)
    got = product(a, b, c, "bf16", "bf16", arch)
    for m in range(8):
        for n in range(8):
            assert got[m, n] == slow([*map(float, a[m])], [*map(float, b[n])], float(c[m, n]), *BITS[arch])


def test_architectures_differ() -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((16, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    c = np.zeros((16, 16), np.float32)
    ampere, hopper = (product(a, b, c, "bf16", "bf16", arch) for arch in BITS)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    assert (ampere != hopper).any()
    assert np.abs(ampere - exact).max() < 1e-4
    assert np.abs(hopper - exact).max() < 1e-4


@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3", "e5m2"])
def test_small_integers_are_exact(kind: str) -> None:
    """Matrix products of small integers are exact, so tests of kernels may compare them without a tolerance."""
    random = np.random.default_rng(1)
    a, b = (random.integers(-4, 5, (16, 32)).astype(ELEMENTS[kind]) for _ in range(2))
    c = random.integers(-9, 9, (16, 16)).astype(np.float32)
    expected = a.astype(np.float32) @ b.astype(np.float32).T + c
    assert (product(a, b, c, kind, kind, (9, 0)) == expected).all()


def test_integers_wrap_and_nan_stays() -> None:
    ones = np.full((1, 32), 127, np.int8)
    assert product(ones, ones, np.array([[2**31 - 1]], np.int32), "s8", "s8", (9, 0)) == np.int32(2**31 - 1 + 32 * 127 * 127 - 2**32)
    nan = np.full((1, 16), np.nan, ml_dtypes.bfloat16)
    assert np.isnan(product(nan, nan, np.zeros((1, 1), np.float32), "bf16", "bf16", (9, 0))).all()
    infinite = np.full((1, 16), np.inf, ml_dtypes.bfloat16)
    assert product(infinite, infinite, np.zeros((1, 1), np.float32), "bf16", "bf16", (9, 0)) == np.inf


def test_eight_bit_floats_keep_thirteen_bits() -> None:
    """In a product of 8-bit floats, terms that are smaller than 2^-13 of the largest term do not change the sum."""
    a, b = np.zeros((1, 32), ml_dtypes.float8_e4m3fn), np.zeros((1, 32), ml_dtypes.float8_e4m3fn)
    a[0, :2], b[0, :2] = 128, [1, 2**-7]  # the products are 2^7 and 1
    assert product(a, b, np.zeros((1, 1), np.float32), "e4m3", "e4m3", (9, 0)) == 129
    a[0, 1] = 2**-1  # makes the second product 2^-8, which is below 2^7 / 2^13
    assert product(a, b, np.zeros((1, 1), np.float32), "e4m3", "e4m3", (9, 0)) == 128
