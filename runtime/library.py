"""Host routines in NumPy for operators that loop nests cannot express: sorting, and results whose size depends on data.

A call passes the inputs, then the attributes in the order of the signature. A routine in destination-passing style also takes its output
arrays. All other routines return new arrays, whose shapes depend on data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UnknownName

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Routine:
    """A routine that programs call as "lib.NAME". `compute(*inputs, *attributes)` returns one array per output."""

    name: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]
    outputs: tuple[str, ...]
    compute: Callable[..., tuple[Array, ...]]
    fresh: bool = False  # the routine returns new arrays instead of filling given ones

    def problem(self, num_inputs: int, attributes: Collection[str], num_outputs: int, *, sized: bool) -> str:
        """Say why a program cannot call the routine like this, or return "" if it can. `sized` says whether the program states the extents
        of all outputs."""
        if num_inputs != len(self.inputs):
            return f"{self.name} has {num_inputs} operands, expected ({', '.join(self.inputs)})"
        if missing := [name for name in self.attributes if name not in attributes]:
            return f"{self.name} needs the attribute {', '.join(missing)}"
        if unknown := sorted({*attributes} - {*self.attributes, "effect"}):
            return f"{self.name} has no attribute {', '.join(unknown)}; it has: {', '.join(self.attributes) or 'none'}"
        if num_outputs != len(self.outputs):
            return f"{self.name} has {len(self.outputs)} results ({', '.join(self.outputs)}), but {num_outputs} are stated"
        if sized and self.fresh:
            return f"the extents of the result of {self.name} depend on data; state only its rank, and name the extents by a match_cast"
        return ""

    @property
    def num_args(self) -> int:
        """The number of arguments of a call."""
        return len(self.inputs) + len(self.attributes) + (0 if self.fresh else len(self.outputs))

    @property
    def signature(self) -> str:
        """The call as text, with the names of its arguments, for messages."""
        outputs = ", ".join(self.outputs)
        given = [*self.inputs, *self.attributes, *(() if self.fresh else self.outputs)]
        return f"lib.{self.name}({', '.join(given)})" + (f" -> {outputs}" if self.fresh else "")


def routine(name: str) -> Routine:
    """Return the routine with this name. Raise UnknownName if there is none."""
    if name not in LIBRARY:
        raise UnknownName("library routine", name, LIBRARY)
    return LIBRARY[name]


# Sorting is stable, and NaN counts as the largest value. Descending order is the reverse of ascending order, except that equal elements
# keep their order.


def _sortable(x: Array) -> Array:
    """Convert elements to f32, which is exact, if NumPy itself does not define their type, such as bf16: it cannot order the NaNs of such
    a type."""
    return x.astype(np.float32) if x.dtype.kind == "V" else x


def _argsort(x: Array, axis: int, descending: bool) -> Array:
    """Return the indices that sort the array along an axis."""
    x = _sortable(x)
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    backwards = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(backwards, axis)


def _sort(x: Array, axis: int, descending: bool) -> tuple[Array, ...]:
    return (np.take_along_axis(x, _argsort(x, axis, descending), axis),)


def _argsort_as(x: Array, axis: int, descending: bool) -> tuple[Array, ...]:
    return (_argsort(x, axis, descending),)


def _topk(x: Array, k: int, axis: int, largest: bool) -> tuple[Array, ...]:
    """Return the `k` largest or smallest elements along an axis, the extreme one first, and their indices."""
    indices = np.take(_argsort(x, axis, largest), np.arange(k), axis)
    return np.take_along_axis(x, indices, axis), indices


# --- cumulative sums ---------------------------------------------------------------------------------------------------


def _cumsum(x: Array, axis: int) -> tuple[Array, ...]:
    """Return the running sums along an axis, added from the first element to the last in the element type."""
    return (np.add.accumulate(x, axis=axis, dtype=x.dtype),)


# --- data-dependent results --------------------------------------------------------------------------------------------


def _unique(x: Array) -> tuple[Array, ...]:
    """Return the distinct elements of the flattened array in ascending order."""
    return (np.unique(_sortable(x)).astype(x.dtype),)


def _nonzero(x: Array) -> tuple[Array, ...]:
    """Return the positions of elements that are not zero, in row-major order: i64 [rank, count]."""
    return (np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1),)


LIBRARY: dict[str, Routine] = {
    r.name: r
    for r in (
        Routine("sort", ("x",), ("axis", "descending"), ("values",), _sort),
        Routine("argsort", ("x",), ("axis", "descending"), ("indices",), _argsort_as),
        Routine("topk", ("x",), ("k", "axis", "largest"), ("values", "indices"), _topk),
        Routine("cumsum", ("x",), ("axis",), ("sums",), _cumsum),
        Routine("unique", ("x",), (), ("values",), _unique, fresh=True),
        Routine("nonzero", ("x",), (), ("positions",), _nonzero, fresh=True),
    )
}
