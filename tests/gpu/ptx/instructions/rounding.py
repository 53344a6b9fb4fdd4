"""Matrix products with the rounding of matrix units. The unit sums several products and the accumulator at once: it aligns these terms to
the largest exponent among them, truncates each to a fixed number of bits, and adds them.

The numbers of terms and bits are those of MMA-Sim (arXiv 2511.10909), whose authors compared their model bit by bit with real cards.
NVIDIA does not document these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.gpu.ptx.instructions.floats import nan_of
from tests.gpu.ptx.native import MOST_COLUMNS, MOST_DEPTH, native
from tests.gpu.ptx.program import Array


@dataclass(frozen=True, slots=True)
class Unit:
    terms: int  # number of products in one fused sum
    fraction: int  # bits of each term that are kept after the binary point, when terms are aligned to the largest exponent


def unit_of(arch: tuple[int, int], *, eight_bits: bool) -> Unit:
    if eight_bits:
        return Unit(32 if arch >= (9, 0) else 16, 13)
    return Unit(16, 25) if arch >= (9, 0) else Unit(8, 24)


ELEMENTS: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
LEAST_EXPONENT = {"bf16": -126, "f16": -14, "e4m3": -6, "e5m2": -14}
NOTHING = -300  # exponent that represents a zero: below all others


def product(a: Array, b: Array, c: Array, a_type: str, b_type: str, arch: tuple[int, int]) -> Array:
    """Return c[..., m, n] + the sum over k of a[..., m, k] b[..., n, k], as a matrix unit computes it. Integer sums are exact and wrap."""
    if a_type in ("s8", "u8"):
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64).swapaxes(-1, -2))  # far below 2^53; NumPy multiplies no integers fast
        return (exact.astype(np.int64) + c).astype(np.int32)
    unit = unit_of(arch, eight_bits=a_type in ("e4m3", "e5m2"))
    a, b = a.astype(np.float64), b.astype(np.float64)
    if (fast := native()) is not None and b.shape[-2] <= MOST_COLUMNS and b.shape[-1] <= MOST_DEPTH:
        found = fast.products(a, b, c, unit.terms, LEAST_EXPONENT[a_type], LEAST_EXPONENT[b_type], unit.fraction)
        if found is not None:
            return found
    for start in range(0, a.shape[-1], unit.terms):
        part = slice(start, start + unit.terms)
        c = _fused(a[..., part], b[..., part], c, LEAST_EXPONENT[a_type], LEAST_EXPONENT[b_type], unit.fraction)
    return c


def _exponent(x: Array, least: int) -> Array:
    """Return the exponents of float64 values that were converted from a narrower type, whose lowest exponent is `least`."""
    exponent = ((x.view(np.int64) >> 52 & 0x7FF) - 1023).astype(np.int16)
    return np.where(x == 0, np.int16(NOTHING), np.maximum(exponent, np.int16(least)))


def _power(exponent: Array) -> Array:
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _fused(a: Array, b: Array, c: Array, least_a: int, least_b: int, fraction: int) -> Array:
    """Compute one fused sum. Axis 0 contains the terms, because NumPy sums fastest along this axis. The sum of truncated terms is exact in
    any order."""
    a, b = (np.ascontiguousarray(np.moveaxis(x, -1, 0)) for x in (a, b))  # [k, ..., m], [k, ..., n]
    wide = np.ascontiguousarray(c.astype(np.float64))
    products = a[..., :, None] * b[..., None, :]  # exact
    exponents = _exponent(a, least_a)[..., :, None] + _exponent(b, least_b)[..., None, :]
    largest = np.maximum(exponents.max(0), np.maximum(_exponent(wide, -126), np.int16(-126)))
    scale = _power(fraction - largest)
    total = np.trunc(products * scale).sum(0) + np.trunc(wide * scale)
    value = total * _power(largest - fraction)
    rounded = value.astype(np.float32)  # rounds to nearest; the next lines correct values that this moved away from zero
    away = np.abs(rounded.astype(np.float64)) > np.abs(value)
    result = np.where(away, np.nextafter(rounded, np.float32(0)), rounded)
    if fraction < 23:  # the result has only `fraction` bits after the binary point, like the terms
        bits = result.view(np.uint32)
        result = (bits & ~np.uint32((1 << (23 - fraction)) - 1)).view(np.float32)
    if all(np.isfinite(x).all() for x in (a, b, wide)):
        return result
    finite = np.isfinite(products).all(0) & np.isfinite(wide)
    special = (products.sum(0) + wide).astype(np.float32)
    return np.where(finite, result, np.where(np.isnan(special), nan_of(np.float32), special))
