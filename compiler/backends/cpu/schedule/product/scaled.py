"""Products of rows of bf16 and numbers with scales. A group of numbers shares a scale: the sum of each group, in f32, is multiplied by the
scale, and groups are added in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.product.panels import Panels
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, TileOrigin, local_per_sum
from compiler.idioms.product import Product
from compiler.idioms.scaled import scaled_numbers
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Contraction, Element, Load, without_cast
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.products import ProductTile


def is_scaled(product: Product[Contraction], tile: ProductTile) -> bool:
    """Return whether the columns of all sums are packed for the tile, and whether the tile can read their rows."""
    found = [(s, scaled_numbers(s)) for s in product.sums]
    return all(n is not None and tile.reads(n.number) and tile.takes_rows(s, product.row_axis) for s, n in found)


@dataclass(frozen=True, slots=True)
class Scaled:
    name: ClassVar[str] = "scaled"
    product: Product[Contraction]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        with Panels(self.product, self.tile.shape).claims(k) as claim:
            for tiles in claim.tiles(k):
                with tiles.each(k) as tile:
                    self.write_tile(k, tile)

    def write_tile(self, k: Kernel, tile: TileOrigin) -> None:
        totals = local_per_sum(k, self.product, "total", tile.shape.rows, tile.shape.vectors, tile.shape.lanes)
        for s, total in zip(self.product.sums, totals, strict=True):
            with tile.elements(k) as at:
                total[at] = 0.0
            self.add_groups(k, s, tile, total)
        with tile.elements(k) as at:
            tile.store(k, at, [total[at] for total in totals])

    def add_groups(self, k: Kernel, s: Contraction, tile: TileOrigin, total: Array) -> None:
        scaled, rows = scaled_numbers(s), without_cast(s.rows)
        assert scaled is not None and isinstance(scaled.number, Element) and isinstance(rows, Load), s
        (stored,), axis, shape = scaled.number.stored, s.axes[0][0], tile.shape
        assert isinstance(stored, Load), s
        matrix = tuple(d.substitute(tile.corner) for d in stored.indices[:-3])
        with k.serial("g", s.extent // scaled.group) as g:
            first = g * scaled.group
            acc = k.local("acc", shape.rows, shape.vectors, shape.lanes)
            with tile.elements(k) as at:
                acc[at] = 0.0
            row = tuple(d.substitute({**tile.corner, axis: first}) for d in rows.indices)
            columns = Load(stored.buffer, (*matrix, tile.panel, first // self.tile.format.depth, ZERO))
            dims = Dim.of(scaled.group), self.product.stride(rows)
            k.tile(self.tile.product(shape.rows), acc[ZERO, ZERO, ZERO], Load(rows.buffer, row), columns, dims=dims)
            with tile.elements(k) as at:
                scale = rewrite_dims(scaled.scale, {**tile.at(*at), axis: first})
                total[at] += acc[at] * cast(scale, total.dtype)
