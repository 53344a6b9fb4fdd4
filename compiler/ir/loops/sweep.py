"""Vectorised loops for kernels written with write.py: full vectors, then a masked remainder."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.loops.write import Kernel, less
from compiler.ir.prove import prove_divisible


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector of the elements start .. start + width - 1, one per lane. Lanes at or beyond `end` do nothing; without an `end` all lanes
    are in use."""

    kernel: Kernel
    part: Dim  # index of the vector within an unrolled group
    start: Dim
    width: int
    end: Dim | None = None

    @property
    def is_full(self) -> bool:
        return self.end is None

    @contextmanager
    def lanes(self) -> Generator[tuple[Dim, Dim]]:
        """Open the loop over the lanes, without lanes at or beyond `end`, and yield the index of the lane and the index of its element."""
        with self.kernel.vector(self.width) as lane:
            index = self.start + lane
            with nullcontext() if self.end is None else self.kernel.when(less(index, self.end)):
                yield lane, index


def sweep(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """Yield vectors of `width` elements that cover the elements first .. end - 1; `first` must not exceed `end`. With `parts`, an unrolled
    loop handles `parts` vectors at a time. The body of a `for` over the sweep is emitted once for full vectors and, unless full vectors
    provably suffice, once for the masked remainder:

        for vector in sweep(k, first, end, 16):
            with vector.lanes() as (lane, index):
                out[index] = x[index] * 2.0
    """
    yield from full_vectors(k, first, end, width, parts)
    yield from masked_vectors(k, first, end, width, parts)


def full_vectors(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """Yield the vectors of a sweep that need no mask."""
    step = width * (parts or 1)
    with k.serial("c", (end - first) // step) as c, nullcontext(Dim.of(0)) if parts is None else k.unroll("u", parts) as part:
        yield Vector(k, part, first + c * step + part * width, width)


def masked_vectors(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """Yield the masked remainder of a sweep, or nothing if the full vectors provably suffice."""
    step, count = width * (parts or 1), end - first
    if prove_divisible(count, step):
        return
    with nullcontext(Dim.of(0)) if parts is None else k.unroll("u", parts) as part:
        start = first + count // step * step + part * width
        with k.when(less(start, end)):
            yield Vector(k, part, start, width, end)
