"""The softmax of rows (query heads of tokens) over some of their keys: the largest score, the sum of the weights, and the sum of the
weighted values.

Two partial softmaxes over different keys combine to the softmax over the keys of both: each is rescaled from its own maximum to the larger
one. So keys can be added in groups of any size (online softmax), and different threads can compute the splits of a sequence's keys (flash
decoding).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.backends.cpu.schedule.folds import fold_halves, larger
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, equal, exp, fma
from compiler.ops.attention.kv_cache import PAGE


@dataclass(frozen=True, slots=True)
class PartialSoftmax:
    """The softmax of a row over a part of its keys."""

    maximum: Scalar
    total: Scalar  # sum of the weights; the weight of a key is exp(its score - maximum)
    values: Callable[[Dim, Dim], Scalar]  # the sum of weighted values, a vector: its element by part and lane


@dataclass(frozen=True, slots=True)
class PartialSoftmaxes:
    """An array of partial softmaxes, in workspace for the splits of a sequence, or in the thread's own memory for the rows of an item."""

    maximum: Array
    total: Array
    values: Array  # sums of weighted values: each is a vector, stored as `parts` vectors of `width` lanes in two further axes

    @staticmethod
    def allocate(allocate: Callable[..., Array], name: str, *shape: Dim | int, parts: int, width: int) -> PartialSoftmaxes:
        """Allocate the arrays. `allocate` is the kernel's `local` or `workspace`."""
        return PartialSoftmaxes(
            allocate(f"{name}_maximum", *shape), allocate(f"{name}_total", *shape), allocate(f"{name}_values", *shape, parts, width)
        )

    def at(self, *index: Dim) -> PartialSoftmax:
        """Return the partial softmax at an index of the array."""
        return PartialSoftmax(self.maximum[index], self.total[index], lambda c, lane: self.values[*index, c, lane])

    def store(self, k: Kernel, index: tuple[Dim, ...], softmax: PartialSoftmax) -> None:
        """Store a partial softmax at an index of the array."""
        self.maximum[index] = softmax.maximum
        self.total[index] = softmax.total
        with lanes(k, self.values) as (c, lane):
            self.values[*index, c, lane] = softmax.values(c, lane)

    def merge(self, k: Kernel, index: tuple[Dim, ...], softmax: PartialSoftmax) -> None:
        """Merge `softmax`, which is over other keys, into the softmax at `index`. If the softmax at `index` contains no key so far, replace
        it: its maximum is -inf, and an exponential of -inf would underflow, which takes hundreds of cycles."""
        maximum, total, values = self.maximum, self.total, self.values
        with k.when(equal(maximum[index], float("-inf"))):
            self.store(k, index, softmax)
        with k.orelse():
            old, new = k.local("old", 1), k.local("new", 1)
            old[0] = maximum[index]
            maximum[index] = larger(maximum[index], softmax.maximum)
            old[0] = exp(old[0] - maximum[index])
            new[0] = exp(softmax.maximum - maximum[index])
            total[index] = fma(softmax.total, new[0], total[index] * old[0])
            with lanes(k, values) as (c, lane):
                values[*index, c, lane] = fma(softmax.values(c, lane), new[0], values[*index, c, lane] * old[0])


@dataclass(frozen=True, slots=True)
class OnlineSoftmax:
    """The softmax of rows over the keys so far, in the thread's own memory."""

    maximum: Array  # [rows, PAGE]: the largest score, in every lane
    sums: Array  # [rows, PAGE]: sums of the weights, with a lane per key of a page
    values: Array  # [rows, parts, width]: the weighted values

    @staticmethod
    def allocate(k: Kernel, count: int, parts: int, width: int) -> OnlineSoftmax:
        """Allocate the softmaxes of `count` rows, whose values are `parts` vectors of `width` lanes."""
        return OnlineSoftmax(k.local("maximum", count, PAGE), k.local("sums", count, PAGE), k.local("values", count, parts, width))

    def clear(self, k: Kernel, row: Dim) -> None:
        """Reset the softmax of a row to one that contains no key."""
        fill(k, self.maximum, row, float("-inf"))
        self.clear_sums(k, row)

    def clear_sums(self, k: Kernel, row: Dim) -> None:
        """Set the sums of weights and of weighted values of a row to 0."""
        fill(k, self.sums, row, 0.0)
        with lanes(k, self.values) as (c, lane):
            self.values[row, c, lane] = 0.0

    def raise_maximum(self, k: Kernel, row: Dim, highest: Array) -> None:
        """Raise the maximum of a row to `highest`, and rescale the sums so far from the old maximum to the new one."""
        rescale = k.local("rescale", PAGE)
        with k.vector(PAGE) as lane:
            rescale[lane] = exp(self.maximum[row, lane] - highest[lane])
        with k.vector(PAGE) as lane:
            self.maximum[row, lane] = highest[lane]
        with k.vector(PAGE) as lane:
            self.sums[row, lane] = self.sums[row, lane] * rescale[lane]
        with lanes(k, self.values) as (c, lane):
            self.values[row, c, lane] = self.values[row, c, lane] * rescale[lane]

    def partial(self, k: Kernel, row: Dim) -> PartialSoftmax:
        """Return the softmax of a row over the keys so far."""
        total = k.local("fold", PAGE)
        with k.vector(PAGE) as lane:
            total[lane] = self.sums[row, lane]
        fold_halves(k, total, operator.add)
        return PartialSoftmax(self.largest(row), total[0], lambda c, lane: self.values[row, c, lane])

    def largest(self, row: Dim) -> Scalar:
        """Return the largest score of a row so far."""
        return self.maximum[row, 0]


# --- helpers -----------------------------------------------------------------------------------------------------------


def fill(k: Kernel, array: Array, row: Dim | None, value: float) -> None:
    """Set all lanes to `value`: those of a vector, or those of row `row` of an array of vectors."""
    with k.vector(PAGE) as lane:
        array[(lane,) if row is None else (row, lane)] = value


@contextmanager
def lanes(k: Kernel, values: Array) -> Generator[tuple[Dim, Dim]]:
    """Loop over the parts of a value and their lanes."""
    parts, width = (d.const for d in values.shape[-2:])
    with k.serial("c", parts) as c, k.vector(width) as lane:
        yield c, lane
