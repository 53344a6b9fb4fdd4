"""Compute fused multiply-adds, sums of matrix units and the access histories of memory in C (native.c), where the software driver's
library is loaded.

NumPy needs a dozen passes for each of them. `floats.py`, `rounding.py`, `shadow.py` and `races.py` define them in NumPy; `test_native.py`
requires the same bits and the same histories.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SOURCE = Path(__file__).with_name("native.c")
MOST_COLUMNS, MOST_DEPTH = 256, 32
_BYTE = ctypes.c_char


class Native:
    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)  # keeps the interpreter's lock, because the calls are short
        pointer, number, time, truth = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int
        self._fma = _function(library.software_gpu_fma, [pointer] * 4 + [number], None)
        self._products = _function(library.software_gpu_products, [pointer] * 3 + [number] * 8, truth)
        accesses = [pointer] * 3 + [number] * 2
        self.read = _function(library.software_gpu_read, [*accesses, time], truth)
        self.overwrite = _function(library.software_gpu_overwrite, accesses, truth)
        self.written = _function(library.software_gpu_written, [*accesses, time], None)
        self.announce = _function(library.software_gpu_announce, [*accesses, truth], truth)
        self.arrive = _function(library.software_gpu_arrive, [*accesses, time, truth], None)
        self.global_read = _function(library.software_gpu_global_read, [*accesses, time, truth], truth)
        self.global_write = _function(library.software_gpu_global_write, [*accesses, time], truth)
        self.begin_reading = _function(library.software_gpu_begin_reading, [pointer, number, pointer, number], truth)

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        """Return a * b + c of float32, rounded once."""
        shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
        a, b, c = (np.ascontiguousarray(x if x.shape == shape else np.broadcast_to(x, shape)) for x in (a, b, c))
        result = np.empty(shape, np.float32)
        self._fma(_begin(a), _begin(b), _begin(c), _begin(result), result.size)
        return result

    def products(self, a: Array, b: Array, c: Array, terms: int, least_a: int, least_b: int, fraction: int) -> Array | None:
        """Return c[..., m, n] + the sum over k of a[..., m, k] b[..., n, k], in sums of `terms` products, or None if a number is not
        finite. `a` and `b` are float64, `c` is float32."""
        (*_, rows, depth), columns = a.shape, b.shape[-2]
        a, b, result = np.ascontiguousarray(a), np.ascontiguousarray(b), np.array(c, np.float32, order="C")
        sizes = result.size // (rows * columns), rows, columns, depth, terms, least_a, least_b, fraction
        return result if self._products(_begin(a), _begin(b), _begin(result), *sizes) else None


def address(numbers: Array) -> int:
    """Return the address of the first of several int64 numbers, which must be adjacent."""
    assert numbers.dtype == np.int64 and numbers.flags.c_contiguous
    return _begin(numbers)


def _begin(array: Array) -> int:
    """Return the address of a contiguous array. `from_buffer` takes a third of the time of `array.ctypes`, and only what can be written."""
    return ctypes.addressof(_BYTE.from_buffer(array.data)) if array.flags.writeable and array.size else array.ctypes.data


def _function(function: Any, arguments: list[Any], result: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


_loaded: list[Native] = []


def use(path: str) -> None:
    """Compute in the functions of this library from now on."""
    _loaded[:] = [Native(path)]


def native() -> Native | None:
    return _loaded[0] if _loaded else None
