"""Sums of groups of integers as in groups.py, for weights in the format `ScaledPanels`. A run is a number of adjacent groups of a panel. In
this format, adjacent runs are in different streams, which are parts of the matrix, and a core reads all streams in turn.

The loop over the groups is split into loops over runs, streams and groups of a run, so that addresses advance by constants.
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

# Targets with this format have no prefetch instruction, so a core waits for memory whenever it changes from the weights of one sum to those
# of the next. Therefore, for a single row, up to MOST_ABREAST panels of one sum are computed before the next sum: as many as leave
# FEWEST_CLAIMS claims for the threads, but at least ABREAST (groups.py).
MOST_ABREAST, FEWEST_CLAIMS = 16, 16


@dataclass(frozen=True, slots=True)
class Streams(Groups):
    """A product of integers whose weights are in streams. It differs from `Groups` in how it finds and orders the weights."""

    @property
    def abreast(self) -> int:
        least, columns = super(Streams, self).abreast, self.product.num_columns
        if least == 1 or not columns.is_const:
            return least
        return max(least, min(MOST_ABREAST, columns.const // self.tile.shape.columns // FEWEST_CLAIMS))

    def write_sum(self, k: Kernel, s: GroupedSum, tile: TileOrigin, acc: Array) -> None:
        """Compute one sum of a tile in `acc`, with the groups in the order in which they are stored."""
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
        """Return the place in the tile's panel at which the group that begins at element `k` of the summed axis is stored."""
        assert isinstance(s.format, ScaledPanels), s
        matrix = tuple(d.substitute(tile.corner) for d in s.matrix)
        return s.format.word(s.panels, matrix, tile.panel, k // s.format.depth, ZERO)
