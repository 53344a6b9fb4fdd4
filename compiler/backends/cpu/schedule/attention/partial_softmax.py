"""The softmax of a row over some of its keys: the largest score, the sum of the weights, and the weighted values.

Two partial softmaxes over different keys combine to the softmax over the keys of both: each is rescaled from its own maximum to the larger
one. So keys can be added in any grouping (online softmax), and different threads can compute the splits of a sequence (flash decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.backends.cpu.schedule.folds import larger
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, equal, exp, fma


@dataclass(frozen=True, slots=True)
class PartialSoftmax:
    maximum: Scalar
    total: Scalar  # sum of the weights, relative to the maximum
    values: Callable[[Dim, Dim], Scalar]  # weighted values, by part and lane


@dataclass(frozen=True, slots=True)
class PartialSoftmaxes:
    """An array of partial softmaxes: those of splits are in workspace, and those of rows are in the thread's own memory."""

    maximum: Array
    total: Array
    values: Array  # weighted values, with two axes more than `maximum`: parts and lanes

    @staticmethod
    def allocate(allocate: Callable[..., Array], name: str, *shape: Dim | int, parts: int, width: int) -> PartialSoftmaxes:
        """Allocate the arrays. `allocate` is the kernel's `local` or `workspace`."""
        return PartialSoftmaxes(
            allocate(f"{name}_maximum", *shape), allocate(f"{name}_total", *shape), allocate(f"{name}_values", *shape, parts, width)
        )

    def at(self, *index: Dim) -> PartialSoftmax:
        return PartialSoftmax(self.maximum[index], self.total[index], lambda c, lane: self.values[*index, c, lane])

    def store(self, k: Kernel, index: tuple[Dim, ...], softmax: PartialSoftmax) -> None:
        self.maximum[index] = softmax.maximum
        self.total[index] = softmax.total
        with self.lanes(k) as (c, lane):
            self.values[*index, c, lane] = softmax.values(c, lane)

    def merge(self, k: Kernel, index: tuple[Dim, ...], softmax: PartialSoftmax) -> None:
        """Merge a softmax over other keys into the softmax at `index`. If that contains no key so far, replace it: the exponential of its
        maximum, -inf, would be an underflow, which takes hundreds of cycles."""
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
            with self.lanes(k) as (c, lane):
                values[*index, c, lane] = fma(softmax.values(c, lane), new[0], values[*index, c, lane] * old[0])

    @contextmanager
    def lanes(self, k: Kernel) -> Generator[tuple[Dim, Dim]]:
        """Loop over the parts of a value and their lanes."""
        parts, width = (d.const for d in self.values.shape[-2:])
        with k.serial("c", parts) as c, k.vector(width) as lane:
            yield c, lane
