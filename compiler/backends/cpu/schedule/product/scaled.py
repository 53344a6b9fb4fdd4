"""Products of bf16 rows by weights with scales, such as 8-bit floats. A group of weights shares a scale: the sum of each group, in f32, is
multiplied by the scale, and groups are added in order.

On vectors, the sums of a tile stay in registers for all groups. On a matrix unit, a thread decodes a part of a panel into memory that stays
in the first-level cache, and multiplies all rows of its block by this part. The unit's sum of a group and the total over groups are in
memory. A claim is what a thread computes at a time: a block of rows with one panel (panels.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.product.blocks import UNIT_BLOCK_ROWS, Heights, Part, multiply
from compiler.backends.cpu.schedule.product.panels import Claim, Panels
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin, local_per_sum
from compiler.idioms.product import Product
from compiler.idioms.scaled import scaled_numbers
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Contraction, Element, Load, Scalar, without_cast
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.intrinsics.amx import AmxStayAwake
from compiler.machine.products import ProductTile


def is_scaled(product: Product[Contraction], tile: ProductTile) -> bool:
    """Return whether, in all sums, the weights have scales and are packed for the tile, a group is a whole number of the tile's steps, and
    the tile can read the rows."""
    found = [(s, scaled_numbers(s)) for s in product.sums]
    return all(
        n is not None and n.group % tile.depth == 0 and tile.reads(n.number) and tile.takes_rows(s, product.row_axis) for s, n in found
    )


@dataclass(frozen=True, slots=True)
class Scaled:
    """A product whose sums multiply pairs of bf16, group after group."""

    name: ClassVar[str] = "scaled"  # the attribute `schedule` of the kernel
    product: Product[Contraction]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        """Write the loops of the product: on vectors tile after tile, on a matrix unit for all rows of a claim together."""
        if self.tile.on_matrix_unit:
            self.write_on_unit(k)
            return
        with Panels(self.product, self.tile.shape).claims(k) as claim:
            for tiles in claim.tiles(k):
                with tiles.each(k) as tile:
                    self.write_tile(k, tile)

    def write_tile(self, k: Kernel, tile: TileOrigin) -> None:
        """Compute each sum of a tile, and store the results."""
        totals = local_per_sum(k, self.product, "total", tile.shape.rows, tile.shape.vectors, tile.shape.lanes)
        for s, total in zip(self.product.sums, totals, strict=True):
            with tile.elements(k) as at:
                total[at] = 0.0
            self.add_groups(k, s, tile, total)
        with tile.elements(k) as at:
            tile.store(k, at, [total[at] for total in totals])

    def add_groups(self, k: Kernel, s: Contraction, tile: TileOrigin, total: Array) -> None:
        """Add one sum of a tile to `total`, group after group: the sum of each group times the scale of the group."""
        numbers, shape = Numbers.of(s), tile.shape
        with k.serial("g", numbers.num_groups) as g:
            acc = k.local("acc", shape.rows, shape.vectors, shape.lanes)
            with tile.elements(k) as at:
                acc[at] = 0.0
            op, dims = self.tile.product(shape.rows), (Dim.of(numbers.group), self.product.stride(numbers.rows))
            k.tile(op, acc[ZERO, ZERO, ZERO], numbers.row(tile, g, ZERO), self.columns(numbers, tile, g, ZERO), dims=dims)
            with tile.elements(k) as at:
                total[at] += acc[at] * numbers.scale(tile, g, at)

    def columns(self, numbers: Numbers, tile: TileOrigin, g: Dim, begin: Dim) -> Load:
        """Return the place in the tile's panel where element `begin` of a group is stored."""
        matrix = tuple(d.substitute(tile.corner) for d in numbers.stored.indices[:-3])
        return Load(numbers.stored.buffer, (*matrix, tile.panel, (g * numbers.group + begin) // self.tile.format.depth, ZERO))

    # --- on a matrix unit ------------------------------------------------------------------------------------------------

    def write_on_unit(self, k: Kernel) -> None:
        """Write the loops of the product on a matrix unit. The rows of a claim share each part of a panel that is decoded."""
        shape, rows = self.tile.shape, 1 if self.product.row_axis is None else UNIT_BLOCK_ROWS
        with Panels(self.product, shape, block_rows=UNIT_BLOCK_ROWS).claims(k) as claim:
            totals = local_per_sum(k, self.product, "total", rows, shape.vectors, shape.lanes)
            for s, total in zip(self.product.sums, totals, strict=True):
                self.add_on_unit(k, s, claim, total)
            with claim.lines(k, claim.end - claim.first) as (m, _, line), line.vectors(k) as (v, lane):
                line.store(k, (ZERO, v, lane), [total[m, v, lane] for total in totals])

    def add_on_unit(self, k: Kernel, s: Contraction, claim: Claim, total: Array) -> None:
        """Compute one sum in `total` for all rows of a claim, which has one panel."""
        numbers, shape, rows = Numbers.of(s), self.tile.shape, total.shape[0].const
        length, count = self.part(numbers.group), numbers.group // self.part(numbers.group)
        with k.scope():
            acc = k.local("acc", rows, shape.vectors, shape.lanes)
            pairs = k.local("pairs", length * shape.columns, dtype=DType.BF16)
            with k.serial("m", claim.end - claim.first) as m, k.unroll("v", shape.vectors) as v, k.vector(shape.lanes) as lane:
                total[m, v, lane] = 0.0
            heights = Heights(claim, self.tile)
            heights.configure(k)
            with k.serial("g", numbers.num_groups) as g:
                self.add_part(k, numbers, heights, g, ZERO, pairs, acc)
                if count > 1:
                    with k.serial("part", count - 1) as part:
                        self.add_part(k, numbers, heights, g, (part + 1) * length, pairs, acc)
                with claim.lines(k, claim.end - claim.first) as (m, _, line), line.vectors(k) as (v, lane):
                    total[m, v, lane] += acc[m, v, lane] * numbers.scale(line, g, (ZERO, v, lane))

    def part(self, group: int) -> int:
        """Return how many elements of a group are decoded at a time: the largest multiple of the tile's step that divides the group and is
        at most the tile's `block`."""
        assert self.tile.block is not None, self.tile
        return max(n for n in range(self.tile.depth, self.tile.block + 1, self.tile.depth) if group % n == 0)

    def add_part(self, k: Kernel, numbers: Numbers, heights: Heights, g: Dim, begin: Dim, pairs: Array, acc: Array) -> None:
        """Decode a part of a group, and add its products to `acc`, which the first part of the group overwrites."""
        claim, length, step = heights.claim, Dim.of(self.part(numbers.group)), self.tile.depth
        assert self.tile.widen is not None, self.tile
        with k.serial("some", length // step) as some:
            columns = self.columns(numbers, claim.tile(claim.panel, claim.first, 1), g, begin + some * step)
            k.tile(self.tile.widen, pairs[some * (step * self.tile.shape.columns)], columns, dims=(Dim.of(step),))
            k.tile(AmxStayAwake())
        stride = self.product.stride(numbers.rows)
        for tile in heights.each(k, claim.panel):
            op = self.tile.product(tile.shape.rows, fresh=begin == ZERO, counted=tile.height is not None)
            place, row = acc[tile.first - claim.first, ZERO, ZERO], numbers.row(tile, g, begin)
            multiply(k, op, place, row, pairs[ZERO], Part(begin, length), stride, height=tile.height)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The operands of one sum: the rows, the stored numbers of the weights, and their scales."""

    rows: Load
    stored: Load
    scale_of: Load
    axis: DimVar  # the contracted axis
    group: int  # number of weights along k that share a scale
    num_groups: Dim

    @staticmethod
    def of(s: Contraction) -> Numbers:
        """Return the operands of a sum of a product for which `is_scaled` holds."""
        scaled, rows = scaled_numbers(s), without_cast(s.rows)
        assert scaled is not None and isinstance(scaled.number, Element) and isinstance(rows, Load), s
        (stored,) = scaled.number.stored
        assert isinstance(stored, Load), s
        return Numbers(rows, stored, scaled.scale, s.axes[0][0], scaled.group, s.extent // scaled.group)

    def row(self, tile: TileOrigin, g: Dim, begin: Dim) -> Load:
        """Return the place of element `begin` of a group in the tile's first row."""
        place = {**tile.corner, self.axis: g * self.group + begin}
        return Load(self.rows.buffer, tuple(d.substitute(place) for d in self.rows.indices))

    def scale(self, tile: TileOrigin, g: Dim, at: tuple[Dim, Dim, Dim]) -> Scalar:
        """Return the scale of a group in the column of an element of the tile."""
        return cast(rewrite_dims(self.scale_of, {**tile.at(*at), self.axis: g * self.group}), DType.F32)
