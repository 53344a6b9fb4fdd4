"""Floating-point operations as a GPU computes them: fused multiply-adds, sums rounded to odd, and the canonical NaN in place of others."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.native import native

Array = NDArray[Any]

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma64 = np.frompyfunc(_libm.fma, 3, 1)


def nan_of(dtype: Any) -> Array:
    """Return the canonical NaN of a float type of 16, 32 or 64 bits."""
    size = np.dtype(dtype).itemsize
    return np.array({2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[size], f"u{size}").view(dtype)


def with_one_nan(values: Array) -> Array:
    """Return floats with the canonical NaN in place of any other."""
    is_nan = np.isnan(values)
    return np.where(is_nan, nan_of(values.dtype), values) if is_nan.any() else values


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once."""
    dtype = a.dtype
    if dtype == np.float32 and (fast := native()) is not None:
        return fast.fma(a, b, c)
    if dtype == np.float64:
        return np.asarray(_fma64(a, b, c), np.float64)
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: float64 has more than twice the significand bits
    return with_one_nan(to_odd_sum(product, c.astype(np.float64)).astype(dtype))


def to_odd_sum(a: Array, b: Array) -> Array:
    """Return a + b rounded to odd. A second rounding to a narrower type then gives the same number as one rounding of the exact sum."""
    if a.shape != b.shape:
        a, b = np.broadcast_arrays(a, b)
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    if not inexact.any():
        return total
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact & (bits & 1 == 0), bits + step, bits).view(np.float64)
