"""Repeat calls of a function that runs one region and returns one array, such as a function of one kernel.

The layouts of the arguments (element types and shapes) determine everything about such a call except addresses and values. So a call whose
arguments have the layouts of the previous call only compares layouts, runs the region and copies the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.device.base import Placed, Repeat
from runtime.executable import DTYPES, Call, DimRef, Imm, Reg, Ret, Slot, TensorSpec, VMFunction
from runtime.memory import Arena


@dataclass(frozen=True, slots=True)
class Result:
    """The place, element type and shape of the array that a function returns in the arena."""

    offset: DimRef
    dtype: np.dtype[Any]
    dims: tuple[DimRef, ...]

    def placed(self, heap: memoryview) -> Placed:
        """Return the place of the array in a call whose integers are in `heap`."""
        offset, *shape = (heap[ref.index] if isinstance(ref, Slot) else ref for ref in (self.offset, *self.dims))
        return Placed(offset, tuple(shape), self.dtype)


def result_of(source: VMFunction) -> Result | None:
    """Return the result of a function whose calls can be repeated: it allocates one array in the arena, runs one region, and returns the
    array, and it changes none of its inputs, which are all arrays. Return None for any other function."""
    if any(p.written or not isinstance(p.spec, TensorSpec) for p in source.inputs):
        return None
    match source.instructions:
        case (
            Call(dst=int() as made, callee="vm.alloc_arena", args=(at, Imm(value=str() as dtype), *dims)),
            Call(callee="vm.run_region"),
            Ret(value=Reg(index=index)),
        ) if made == index and dtype in DTYPES:
            refs = [ref.value if isinstance(ref, Imm) else ref for ref in (at, *dims)]
        case _:
            return None
    known = [ref for ref in refs if isinstance(ref, (int, Slot))]
    return Result(known[0], DTYPES[dtype], tuple(known[1:])) if len(known) == len(refs) else None


class Replay:
    """Repeats an earlier call, which needed `num_bytes` of the arena, with other arguments of the same layouts."""

    __slots__ = ("_arena", "_num_bytes", "_num_inputs", "_repeat")

    def __init__(self, arena: Arena, num_inputs: int, num_bytes: int, repeat: Repeat) -> None:
        self._arena, self._num_inputs, self._num_bytes, self._repeat = arena, num_inputs, num_bytes, repeat

    def call(self, args: Sequence[Any], views: bool) -> Any:
        """Return the result of a call, or None if the call differs from the earlier one in more than addresses and values."""
        memory = self._arena.again(self._num_bytes) if len(args) == self._num_inputs else None
        return None if memory is None else self._repeat(args, memory, views)
