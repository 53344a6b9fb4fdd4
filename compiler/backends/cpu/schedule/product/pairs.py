"""Products of bf16 matrices. Instructions multiply pairs of neighbours along k, the axis that is summed, on vectors or on a matrix unit. A
matrix unit computes k in parts, and accumulators are in memory between the parts. A claim is what a thread computes at a time: a block of
rows with one or more panels (panels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.product.blocks import UNIT_BLOCK_ROWS, Blocks, LinesAhead, Part, configure, configure_counted, multiply
from compiler.backends.cpu.schedule.product.panels import Panels, Remainder, Tiles
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin, local_per_sum
from compiler.idioms.product import Product
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Contraction, Load
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel
from compiler.machine.intrinsics.amx import TILE_ROWS
from compiler.machine.products import ProductTile


@dataclass(frozen=True, slots=True)
class Pairs:
    """A product whose sums multiply pairs of bf16."""

    name: ClassVar[str] = "pairs"  # the attribute `schedule` of the kernel
    product: Product[Contraction]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        if self.tile.on_matrix_unit:
            self.write_on_unit(k)
        else:
            self.write_in_registers(k)

    def write_in_registers(self, k: Kernel) -> None:
        """Write the loops of the product on vectors: each tile computes the whole of k in registers."""
        with Panels(self.product, self.tile.shape).claims(k) as claim:
            for tiles in claim.tiles(k):
                with tiles.each(k) as tile:
                    accs = local_per_sum(k, self.product, "acc", tile.shape.rows, tile.shape.vectors, tile.shape.lanes)
                    with tile.elements(k) as at:
                        for acc in accs:
                            acc[at] = 0.0
                    for s, acc in zip(self.product.sums, accs, strict=True):
                        self.add(k, s, acc[ZERO, ZERO, ZERO], tile, self.all_of_k)
                    with tile.elements(k) as at:
                        tile.store(k, at, [acc[at] for acc in accs])

    def write_on_unit(self, k: Kernel) -> None:
        """Write the loops of the product on a matrix unit. Each claim computes its tiles of full height, and then its remaining rows."""
        blocks = Blocks(self.product.extent, self.tile, self.product.num_columns, len(self.product.sums))
        with Panels(self.product, self.tile.shape, together=blocks.together, block_rows=UNIT_BLOCK_ROWS).claims(k) as claim:
            with k.scope():
                self.write_block(k, blocks, claim.full_tiles)
            for rest in claim.remainders(k, TILE_ROWS):
                self.write_rest(k, rest)

    def write_block(self, k: Kernel, blocks: Blocks, tiles: Tiles) -> None:
        """Compute the sums of all tiles of full height, one part of k after another, and store the results."""
        claim, shape = tiles.claim, self.tile.shape
        accs = local_per_sum(k, self.product, "acc", blocks.together, UNIT_BLOCK_ROWS, shape.vectors, shape.lanes)
        configure(k, self.tile, tiles.rows)
        for tile, part, ahead in blocks.tiles(k, tiles):
            beside, m = tile.panel - claim.panel, tile.first - claim.first
            for s, acc in zip(self.product.sums, accs, strict=True):
                self.add(k, s, acc[beside, m, ZERO, ZERO], tile, part, ahead)
        with claim.lines(k, tiles.num_rows) as (m, beside, line):
            self.store_line(k, line, accs, beside, m)

    def write_rest(self, k: Kernel, rest: Remainder) -> None:
        """Compute the sums of the remaining rows, over the whole of k at once, and store the results."""
        shape = self.tile.shape
        accs = local_per_sum(k, self.product, "acc", 1, rest.most, shape.vectors, shape.lanes)
        configure_counted(k, self.tile, rest.num_rows)
        with rest.each(k) as tile:
            for s, acc in zip(self.product.sums, accs, strict=True):
                self.add(k, s, acc[ZERO, ZERO, ZERO, ZERO], tile, self.all_of_k)
            with tile.lines(k) as (m, line):
                self.store_line(k, line, accs, ZERO, m)

    def store_line(self, k: Kernel, line: TileOrigin, accs: Sequence[Array], beside: Dim, m: Dim) -> None:
        """Store one row of the result. The caller's loop over rows is not unrolled, because the code of an epilogue can be long."""
        with line.vectors(k) as (v, lane):
            line.store(k, (ZERO, v, lane), [acc[beside, m, v, lane] for acc in accs])

    @property
    def all_of_k(self) -> Part:
        return Part(ZERO, self.product.extent)

    def add(self, k: Kernel, s: Contraction, acc: Load, tile: TileOrigin, part: Part, ahead: LinesAhead | None = None) -> None:
        """Add the products of a part of k to the accumulators. On a matrix unit, the first part overwrites them."""
        factors = self.tile.factors(s)
        assert factors is not None, s
        place = {**tile.corner, s.axes[0][0]: part.begin}
        rows, columns = (rewrite_dims(factor, place) for factor in factors)
        assert isinstance(rows, Load) and isinstance(columns, Load)
        op = self.tile.product(tile.shape.rows, fresh=part.is_first, counted=tile.height is not None)
        multiply(k, op, acc, rows, columns, part, self.product.stride(factors[0]), ahead=ahead, height=tile.height)
