"""Elements in vectors: full ones, then a masked rest. In the language of write.py."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.loops.write import Kernel, less
from compiler.ir.prove import prove_divisible


@dataclass(frozen=True, slots=True)
class Vector:
    """Elements start .. start + width - 1, one per lane. Lanes at `end` and behind it do nothing; without an `end` all are in use."""

    kernel: Kernel
    part: Dim  # its number among the vectors that a sweep takes at a time
    start: Dim
    width: int
    end: Dim | None = None

    @property
    def is_full(self) -> bool:
        return self.end is None

    @contextmanager
    def lanes(self) -> Generator[tuple[Dim, Dim]]:
        """Yields the lane and the index of its element."""
        with self.kernel.vector(self.width) as lane:
            index = self.start + lane
            with nullcontext() if self.end is None else self.kernel.when(less(index, self.end)):
                yield lane, index


def sweep(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """Vectors that cover the elements first .. end - 1, `parts` at a time in an unrolled loop. The body of a `for` over them is written
    once for full vectors and, unless these provably suffice, once for the masked rest:

        for vector in sweep(k, first, end, 16):
            with vector.lanes() as (lane, index):
                out[index] = x[index] * 2.0
    """
    yield from full_vectors(k, first, end, width, parts)
    yield from masked_vectors(k, first, end, width, parts)


def full_vectors(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """The part of a sweep that needs no mask."""
    step = width * (parts or 1)
    with k.serial("c", (end - first) // step) as c, nullcontext(Dim.of(0)) if parts is None else k.unroll("u", parts) as part:
        yield Vector(k, part, first + c * step + part * width, width)


def masked_vectors(k: Kernel, first: Dim, end: Dim, width: int, parts: int | None = None) -> Iterator[Vector]:
    """The rest of a sweep; none where the full vectors provably suffice."""
    step, count = width * (parts or 1), end - first
    if prove_divisible(count, step):
        return
    with nullcontext(Dim.of(0)) if parts is None else k.unroll("u", parts) as part:
        start = first + count // step * step + part * width
        with k.when(less(start, end)):
            yield Vector(k, part, start, width, end)
