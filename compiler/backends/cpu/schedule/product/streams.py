"""Sums of groups of integers as in groups.py, for weights in the format `ScaledPanels`: each run of groups is in the next stream.

The loop over the groups is three loops, so that addresses advance by constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.backends.cpu.schedule.product.groups import Groups, of_group
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin
from compiler.idioms.product import GroupedSum
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Array, Kernel
from compiler.machine.formats import ScaledPanels

# The CPU cannot prefetch here, so each change to the next sum waits for memory. Then a single row computes more panels before, if there are
# FEWEST_CLAIMS claims for threads to share.
MOST_ABREAST, FEWEST_CLAIMS = 16, 16


@dataclass(frozen=True, slots=True)
class Streams(Groups):
    @property
    def abreast(self) -> int:
        least, columns = super(Streams, self).abreast, self.product.num_columns
        if least == 1 or not columns.is_const:
            return least
        return max(least, min(MOST_ABREAST, columns.const // self.tile.shape.columns // FEWEST_CLAIMS))

    def write_sum(self, k: Kernel, s: GroupedSum, tile: TileOrigin, acc: Array) -> None:
        format, panels = s.format, s.panels
        assert isinstance(format, ScaledPanels), s
        num_streams, _, num_runs, _ = panels.shape[-format.num_indices :]
        size = format.groups_of_run(panels)
        self.begin(k, s, tile, acc)
        with k.serial("run", num_runs) as run, k.serial("stream", num_streams) as stream, k.serial("i", size) as i:
            g = (run * num_streams + stream) * size + i
            with self.exact_sums(k, s, tile, g) as (at, total):
                acc[at] += total * of_group(s.node.factor, s, tile, g, at)

    def panel(self, s: GroupedSum, tile: TileOrigin, k: Dim) -> Load:
        assert isinstance(s.format, ScaledPanels), s
        matrix = tuple(d.substitute(tile.corner) for d in s.matrix)
        return s.format.word(s.panels, matrix, tile.panel, k // s.format.depth, ZERO)
