"""Sums of f32, with columns in the lanes of vectors.

An accumulator adds its products one after another and rounds once for each, so the bits are the same on every instruction set with a fused
multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

from compiler.backends.cpu.schedule.product.panels import Panels
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin, local_per_sum
from compiler.idioms.nest import in_bounds
from compiler.idioms.product import Product
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Contraction, Load, without_cast
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel
from compiler.ir.prove import prove_divisible
from compiler.machine.intrinsics.prefetch import AHEAD, Prefetch
from compiler.machine.products import FloatTile, TileShape
from compiler.machine.target import LINE_BYTES


@dataclass(frozen=True, slots=True)
class Floats:
    """A product whose sums add products of f32 in vectors."""

    name: ClassVar[str] = "matmul"  # the attribute `schedule` of the kernel
    product: Product[Contraction]
    tile: FloatTile

    def write(self, k: Kernel) -> None:
        """Write the loops of the product. For a single row, several panels may be computed together, as one wide tile."""
        panels = Panels(self.product, replace(self.tile.shape, rows=self.rows), abreast=self.abreast)
        with panels.claims(k) as claim:
            for tiles in claim.tiles(k):
                if tiles.are_abreast:
                    self.write_tile(k, self.wide_tile(claim.tile(claim.panel, tiles.first, 1)))
                else:
                    with tiles.each(k) as tile:
                        self.write_tile(k, tile)

    @property
    def rows(self) -> int:
        """The largest number of rows of a tile. Several sums share the registers, so a product of several sums has tiles of fewer rows."""
        return max(1, self.tile.shape.rows // (1 << (len(self.product.sums) - 1).bit_length()))

    @property
    def abreast(self) -> int:
        """The number of panels that are computed together for a single row. With two panels of one sum, a core adds products of one panel
        while additions to the sums of the other panel are pending. So additions take no longer than reads from memory, and enough registers
        remain for the scales of columns even on machines with 16 registers."""
        return 2 if self.product.row_axis is not None and self.rows > 1 and len(self.product.sums) == 1 else 1

    def wide_tile(self, tile: TileOrigin) -> TileOrigin:
        """Return the tile of one row that spans all panels computed together."""
        shape = self.tile.shape
        return replace(tile, shape=TileShape(1, shape.vectors * self.abreast, shape.lanes), panel=tile.panel // self.abreast)

    def write_tile(self, k: Kernel, tile: TileOrigin) -> None:
        """Compute each sum of a tile, and store the results."""
        shape, extent = tile.shape, self.product.extent
        steps = next(n for n in (self.tile.steps, 2, 1) if prove_divisible(extent, n))
        accs = local_per_sum(k, self.product, "acc", shape.rows, shape.vectors, shape.lanes)
        with tile.elements(k) as at:
            for acc in accs:
                acc[at] = 0.0
        with k.serial("r", extent // steps) as r:
            if shape.rows > 1:  # a single row waits for memory anyway, so prefetching does not help it
                for s in self.product.sums:
                    prefetch(k, s, tile, r * steps, steps)
            for step in range(steps):
                with k.scope():
                    self.add_products(k, tile, accs, r * steps + step)
        with tile.elements(k) as at:
            tile.store(k, at, [acc[at] for acc in accs])

    def add_products(self, k: Kernel, tile: TileOrigin, accs: Sequence[Array], r: Dim) -> None:
        """Add the products of index `r` along k to the accumulators. Columns after the last one of the product are not loaded where that
        could read past a buffer; their sums are never stored."""
        sums, shape = self.product.sums, tile.shape
        contracted = {s.axes[0][0]: r for s in sums}
        columns = local_per_sum(k, self.product, "w", shape.vectors, shape.lanes)
        with tile.vectors(k) as (v, lane):
            for w, s in zip(columns, sums, strict=True):
                value = rewrite_dims(s.columns, {**tile.at(ZERO, v, lane), **contracted})
                with nullcontext() if tile.is_whole or in_bounds(value) else k.when(tile.is_inside(v, lane)):
                    w[v, lane] = value
        with tile.elements(k) as (m, v, lane):
            for acc, w, s in zip(accs, columns, sums, strict=True):
                acc[m, v, lane] += rewrite_dims(s.rows, {**tile.at(m, v, lane), **contracted}) * w[v, lane]


def prefetch(k: Kernel, s: Contraction, tile: TileOrigin, first: Dim, steps: int) -> None:
    """Prefetch as much of a packed panel as `steps` steps read, beginning AHEAD bytes after the place of step `first`, because the hardware
    does not prefetch so far ahead. Do nothing if the columns are not packed for the tile."""
    load, columns = without_cast(s.columns), tile.shape.columns
    if not isinstance(load, Load) or load.buffer.shape[-1] != Dim.of(columns):
        return
    corner = {**tile.corner, s.axes[0][0]: first}
    num_lines = steps * columns * load.buffer.dtype.num_bytes // LINE_BYTES
    k.tile(Prefetch(far=True, ahead=AHEAD, lines=max(num_lines, 1)), Load(load.buffer, tuple(d.substitute(corner) for d in load.indices)))
