"""The layouts of the arrays of a call, in the form in which layouts.ll compares them with the arrays of later calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Placed

_OBJECTS = 5  # index of the first address of an object among the words of a plan: see layouts.ll


class Plan:
    """The layouts of arrays, and the place of the result in the arena. Before a run, the caller passes the addresses of all arrays by
    `give(id(target), id(array), ...)`, and keeps these arrays alive until the run ends. `target` receives a copy of the result; 0 instead
    of its address: the result stays in the arena."""

    def __init__(self, arrays: Sequence[NDArray[Any]], bases: Sequence[int], result: Placed, arena: int) -> None:
        """`bases` has the base of each array, and `arena` is the base of the arena."""
        num_bytes = prod(result.shape) * result.dtype.itemsize
        words = [len(arrays), id(np.ndarray), arena, result.offset, num_bytes, 0, *([0] * len(arrays))]
        for array, base in zip(arrays, bases, strict=True):
            words += [base, id(array.dtype), array.ndim, *array.shape]
        self._dtypes = [array.dtype for array in arrays]  # keeps these objects alive, so that their addresses in `words` stay valid
        self._words = np.array(words, np.int64)
        self.address = self._words.ctypes.data
        self.give = partial(Struct(f"{1 + len(arrays)}q").pack_into, self._words.data.cast("B"), 8 * _OBJECTS)
