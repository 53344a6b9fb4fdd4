"""The fused multiply-add in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any] | np.floating[Any]


def numpy_fma(a: NDArray[Any], b: Floats, c: Floats) -> NDArray[Any]:
    """Return a * b + c in the type of `a`. The product of two f32 is exact in f64, but the sum is rounded twice, to f64 and to the result.
    This differs from a single rounding only if the first result is a tie, which happens once in about 2^29 sums."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)
