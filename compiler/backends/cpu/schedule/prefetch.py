"""Prefetch rows that are read soon, so that memory transfers overlap with computation."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Kernel
from compiler.machine.intrinsics import prefetch as tiles


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetches `row` of each buffer into the second-level cache, because the first-level cache is in use for the row that is computed."""

    buffers: tuple[Buffer, ...]
    row: tuple[Dim, ...]

    def vector(self, k: Kernel, start: Dim) -> None:
        """Prefetch the elements of a vector, beginning at element `start`."""
        for buffer in self.buffers:
            k.tile(tiles.Prefetch(far=True), Load(buffer, (*self.row, start)))


NO_PREFETCH = Prefetch((), ())
