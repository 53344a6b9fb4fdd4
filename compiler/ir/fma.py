"""The fused multiply-add in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any] | np.floating[Any]


def numpy_fma(a: NDArray[Any], b: Floats, c: Floats) -> NDArray[Any]:
    """Return a * b + c in the type of `a`, computed in f64. The product of two f32 is exact in f64, but the sum is rounded twice, to f64
    and then to the type of `a`. For f32, the result can differ from that of a single rounding only if the f64 is halfway between two f32,
    which happens about once in 2^29 sums."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)
