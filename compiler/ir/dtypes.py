"""Element types. Numbers of 4 bits have no type of their own: a `u8` holds two of them, and loop nests unpack them."""

from __future__ import annotations

import math
from enum import StrEnum

import ml_dtypes
import numpy as np


class DType(StrEnum):
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "e4m3"  # 8 bits: finite numbers from -448 to 448, and NaN
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U32 = "u32"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype:
        return _NUMPY[self]

    @property
    def num_bytes(self) -> int:
        return _NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16, DType.BF16, DType.E4M3)

    @property
    def is_int(self) -> bool:
        return not self.is_float and self is not DType.BOOL

    @property
    def is_unsigned(self) -> bool:
        return self in (DType.U8, DType.U32, DType.BOOL)

    @property
    def accumulator(self) -> DType:
        """The type in which reductions and elementwise operators compute: f32 for floats, the type itself for all others."""
        return DType.F32 if self.is_float else self

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value of the type. Both are infinite for floats other than e4m3. For bool, they are 0 (false) and 1
        (true)."""
        if self is DType.E4M3:
            return -448.0, 448.0
        if self.is_float:
            return -math.inf, math.inf
        if self is DType.BOOL:
            return 0, 1
        ends = np.iinfo(self.numpy)
        return int(ends.min), int(ends.max)

    def holds(self, number: float) -> bool:
        """Return whether a constant of this type may be this number. A float type accepts every number, and rounds it. An integer type
        accepts integers in its range, also if they are Python floats, such as 2.0. The type bool accepts only True and False."""
        if self.is_float or self is DType.BOOL:
            return self.is_float or isinstance(number, bool)
        low, high = self.ends
        return (isinstance(number, int) or number.is_integer()) and low <= number <= high

    @staticmethod
    def from_numpy(dtype: np.dtype) -> DType:
        """Return the element type of arrays of this NumPy type. Raise ValueError if there is none."""
        for ours, theirs in _NUMPY.items():
            if theirs == dtype:
                return ours
        known = ", ".join(str(theirs) for theirs in _NUMPY.values())
        raise ValueError(f"NumPy dtype {dtype} is not supported; known: {known}")


_NUMPY: dict[DType, np.dtype] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.I8: np.dtype(np.int8),
    DType.I16: np.dtype(np.int16),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.U8: np.dtype(np.uint8),
    DType.U32: np.dtype(np.uint32),
    DType.BOOL: np.dtype(np.bool_),
}
