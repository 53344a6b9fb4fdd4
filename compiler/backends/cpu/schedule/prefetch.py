"""Rows that are wanted soon are prefetched: memory does not wait for arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Kernel
from compiler.machine.intrinsics import prefetch as tiles


@dataclass(frozen=True, slots=True)
class Prefetch:
    """One row of each of these buffers, into the second-level cache: the first holds the row that is being worked on."""

    buffers: tuple[Buffer, ...]
    row: tuple[Dim, ...]

    def vector(self, k: Kernel, start: Dim) -> None:
        """The elements of a vector, from element `start` on."""
        for buffer in self.buffers:
            k.tile(tiles.Prefetch(far=True), Load(buffer, (*self.row, start)))


NO_PREFETCH = Prefetch((), ())
